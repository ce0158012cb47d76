"""A rank that computes wrong numbers: the run ends with the rank's name, and saves nothing that holds them."""

from __future__ import annotations

import json
import re

import pytest

from tests.recipes.launching import Bench
from tests.recipes.small_jobs import RECIPES
from tests.recipes.test_launch_attached import srun
from tests.suites import TORTURE

SHORT = (
    *("training.max_steps=8", "training.global_batch_size=6", "training.micro_batch_size=2", "training.seq_len=64"),
    *("data.max_samples=32", "data.max_eval_samples=2", "generation.samples=0", "cluster.device=cpu"),
    *("checkpoint.every=2", "checkpoint.async_save=true", "checkpoint.check_replicas=5", "training.eval_every=0"),
    *("logging.plot=false", "run.dir=mine", "parallelism=ddp", "cluster.oversubscribe=true"),
)
FAULT = {"MESHBOOK_FAULT": "flip=7:weights:rank1:5"}
"""One bit of rank 1's weights is flipped after the update of step 5, before the comparison."""
COUNTED = """
from components.checkpoint.replica_check import ReplicaCheck

compare = ReplicaCheck.compare


def counted(check: ReplicaCheck, step: int) -> None:
    print(f"comparison after step {step}", flush=True)
    compare(check, step)


if compare.__name__ == "compare":  # a forked process may run these lines twice
    ReplicaCheck.compare = counted
"""
"""Lines of a recipe with which every comparison of replicas is printed."""


def test_wrong_rank_of_three_ends_the_run_and_the_command_resumes(bench: Bench) -> None:
    """The replicas are compared after every step, and once where a save follows."""
    text = (RECIPES / "finetune.py").read_text()
    bench.recipe.write_text(text.replace("\n\n\n@recipe", f"\n{COUNTED}\n\n@recipe"))
    command = (*SHORT, "cluster.procs_per_node=3", "checkpoint.check_replicas=1")
    done = bench.start(*command, environment=FAULT).wait()
    assert done.status == 76, done.errors
    run = bench.folder / "mine"
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "corrupted"
    assert re.match(r"rank 1 on host \S+ computes wrong numbers without an error: a majority", result["error"])
    assert "after step 5 the bits of 1 of 80 replicated tensors differ (model/" in result["error"]
    assert "which were equal after step 4; this state is not saved" in result["error"]
    assert done.errors.splitlines()[-2:] == [result["error"], f"logs: {run / 'logs' / 'attempt_0'}"]
    assert "Traceback" not in done.errors
    assert "0.4 MiB of 0.4 MiB of parameters, with their optimizer state, are replicated on 3 ranks" in " ".join(
        done.output.split()
    )
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert not (run / "export").exists()
    log = (run / "logs" / "attempt_0" / "rank_1.log").read_text()
    assert re.findall(r"comparison after step (\d+)", log) == ["1", "2", "3", "4", "5"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3, 4, 5]  # the loss of 5 is before its update
    if TORTURE:
        bench.complete(*command)
        log = (run / "logs" / "attempt_1" / "rank_1.log").read_text()
        assert re.findall(r"comparison after step (\d+)", log) == ["5", "6", "7", "8"]
        assert json.loads((run / "result.json").read_text())["status"] == "ok"
        assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["step_6", "step_8"]


@pytest.mark.new_interpreter
@pytest.mark.skipif(not TORTURE, reason="starts ranks by srun's variables: make torture")
def test_attached_ranks_print_the_message_once(bench: Bench) -> None:
    """Two replicas differ: both are named. The state of the last step is compared too if it is not saved."""
    bench.recipe.write_text((RECIPES / "finetune.py").read_text())
    fault = {"MESHBOOK_FAULT": "flip=7:optimizer_state:rank1:8"}
    changes = ("training.global_batch_size=4", "checkpoint.every=0", "checkpoint.last=false")
    first, second = srun(bench, *SHORT, *changes, environment=fault)
    assert (first.status, second.status) == (76, 76), first.errors + second.errors
    texts = [each.errors for each in (first, second)]
    assert sum("one of 2 ranks computes wrong numbers" in text for text in texts) == 1
    assert not any("Traceback" in text for text in texts)
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert result["status"] == "corrupted"
    assert "no majority shows which: rank 0 on host" in result["error"]
    assert not (bench.folder / "mine" / "export").exists()
