"""Recipes started by the user's own torchrun or srun: one composed config, one run directory, one error message."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from tests.recipes.launching import Bench, Done
from tests.suites import TORTURE

pytestmark = pytest.mark.new_interpreter

REPORT = """
from components import distributed
import torch
import torch.distributed as dist

info = distributed.start_process_group("cpu")
value = torch.tensor([1.0])
dist.all_reduce(value)
values = [cfg.run.dir, cfg.run.name, value.item(), os.environ["MESHBOOK_RUN_DIR"], os.environ["MESHBOOK_ATTEMPT"]]
(Path(__file__).parent / f"report_{info.rank}").write_text(json.dumps(values))
"""


def srun(bench: Bench, *arguments: str, environment: dict[str, str] | None = None) -> list[Done]:
    """Start two tasks of one job step with the variables that srun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for task in ("0", "1"):
        step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
        rank_variables = {"SLURM_PROCID": task, "SLURM_LOCALID": task, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
        rank_variables |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port}
        rank_variables |= {"MASTER_ADDR": "127.0.0.1"}
        started.append(bench.start(*arguments, environment={**step, **rank_variables, **(environment or {})}))
    return [each.wait() for each in started]


def torchrun(bench: Bench, *arguments: str) -> Done:
    module = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return bench.start(*arguments, command=module).wait()


def assert_one_run(bench: Bench) -> None:
    (run,) = bench.run_directories()
    assert bench.notes("report") == [json.dumps([str(run), "mine", 2.0, str(run), "0"])] * 2
    assert json.loads((run / "environment.json").read_text())["processes"] == 2


def test_torchrun_ranks_share_one_run(bench: Bench) -> None:
    bench.write(REPORT)
    done = torchrun(bench, "run.name=mine")
    assert done.status == 0, done.errors
    assert_one_run(bench)
    bench.assert_no_process_left()


def test_srun_tasks_share_one_run(bench: Bench) -> None:
    bench.write(REPORT)
    done = srun(bench, "run.name=mine")
    assert [each.status for each in done] == [0, 0], done
    assert_one_run(bench)
    bench.assert_no_process_left()


def test_every_rank_uses_only_the_cache_if_the_hub_is_unreachable(bench: Bench) -> None:
    """Otherwise each other rank retries to connect for minutes, while rank 0 waits for it."""
    bench.write("""
        from huggingface_hub import constants
        (Path(__file__).parent / f"offline_{os.environ['SLURM_PROCID']}").write_text(str(constants.HF_HUB_OFFLINE))
    """)
    (bench.folder / "home" / "datasets" / "owner___rows").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(bench.folder / "home"), "HF_HUB_OFFLINE": ""}
    done = srun(bench, "data=jsonl", "data.path=owner/rows", environment=environment)
    assert [each.status for each in done] == [0, 0], done
    assert "the hub cannot be reached" in done[0].errors
    assert bench.notes("offline") == ["True", "True"]


def test_mesh_that_does_not_fit_is_rejected_by_all_ranks_with_one_message(bench: Bench) -> None:
    bench.write("(Path(__file__).parent / 'ran').touch()")
    done = srun(bench, "parallelism=tp3")
    assert [each.status for each in done] == [2, 2]
    messages = done[0].errors.splitlines()
    assert len(messages) == 1
    assert "tp 3 = 3 processes, but there are 2" in messages[0]
    assert done[1].errors == ""
    assert [entry.name for entry in bench.folder.iterdir()] == ["tried.py"]


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (["--cfg", "job"], 0, "run:\n"),
        (["--nonsense"], 2, "--nonsense: no such option"),
        *([(["-m", "run.seed=1,2"], 2, "start it with python")] if TORTURE else []),
    ],
)
def test_output_or_config_error_of_rank_zero_ends_all_ranks(
    bench: Bench, arguments: list[str], status: int, shown: str
) -> None:
    bench.write("(Path(__file__).parent / 'ran').touch()")
    done = srun(bench, *arguments)
    assert [each.status for each in done] == [status, status]
    assert shown in done[0].output + done[0].errors
    assert done[1].output + done[1].errors == ""
    assert [entry.name for entry in bench.folder.iterdir()] == ["tried.py"]


def test_config_error_raised_on_ranks_is_reported_once_and_leaves_no_files(bench: Bench) -> None:
    bench.write("raise ConfigError('data.path=x: has no rows')")
    done = srun(bench)
    assert [each.status for each in done] == [2, 2]
    errors = "".join(each.errors for each in done)
    assert errors.count("data.path=x: has no rows") == 1
    assert "Traceback" not in errors
    assert [entry.name for entry in bench.folder.iterdir()] == ["tried.py"]


def test_rank_whose_agent_died_before_start_exits_and_leaves_no_files(bench: Bench) -> None:
    """Nothing else would end it, and the user's next start would find the run directory in use."""
    bench.write("(Path(__file__).parent / 'ran').touch()")
    with socket.socket() as bound:  # nothing listens there
        bound.bind(("127.0.0.1", 0))
        agent = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
        rank_variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(bound.getsockname()[1])}
        done = bench.start(environment={**agent, **rank_variables}).wait()
    assert done.status == 1
    assert done.errors == "torchrun's agent exited before this rank started\n"
    assert [entry.name for entry in bench.folder.iterdir()] == ["tried.py"]


def test_single_external_rank_does_not_import_torch(bench: Bench) -> None:
    bench.write("note('torch', 'torch' in sys.modules)")
    bench.complete(environment={"RANK": "0", "WORLD_SIZE": "1"})
    assert bench.notes("torch") == ["False"]
    assert len(bench.run_directories()) == 1
