"""Sweeps as a user starts them: real processes, memory limits and kills, and one table at the end."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.recipes.launching import Bench, Done
from tests.suites import in_torture

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """# @package _global_
defaults:
  - bench_mesh
  - override /model: tiny
  - override /parallelism: PARALLELISM
cluster: {procs_per_node: "PROCESSES", device: cpu}
training: {max_steps: 3, seq_len: 64, global_batch_size: 4}
data: {max_samples: 32, max_eval_samples: 4}
"""
TOO_LARGE = "model: {config: {hidden_size: 40960, intermediate_size: 163840}}\n"  # one matrix: 25 GiB
RESULT = """
def result(**values):
    (Path(cfg.run.dir) / "result.json").write_text(json.dumps(values))
seed = cfg.run.seed
with (Path(__file__).parent / "started").open("a") as file:
    file.write(f"{seed} ")
"""
"""The first lines of a main that does not train: it records its start and can write result.json."""


SHORT = (
    *("experiment=bench_mesh", "parallelism=single", "cluster.device=cpu", "training.max_steps=4"),
    *("training.seq_len=64", "training.global_batch_size=4", "data.max_samples=32", "data.max_eval_samples=4"),
)


def report(sweep: Path, *options: str, cwd: Path) -> Done:
    command = [sys.executable, str(ROOT / "scripts" / "sweep_report.py"), str(sweep), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr, 0.0)


def states(sweep: Path) -> dict[str, str]:
    with (sweep / "report.csv").open() as file:
        return {row["run"]: row["status"] for row in csv.DictReader(file)}


def only_sweep(bench: Bench) -> Path:
    (sweep,) = (bench.folder / "outputs" / "sweeps" / "finetune").iterdir()
    return sweep


def test_sweep_reports_ok_invalid_and_oom_runs(bench: Bench) -> None:
    """Three runs train the same curve, one mesh does not fit its processes, and one model exceeds the memory limit."""
    folder = bench.folder / "conf" / "experiment"
    folder.mkdir(parents=True)
    meshes = {"alone": ("single", 1), "ddp2": ("ddp", 2), "fsdp2x2": ("fsdp2", 2), "misfit": ("tp3", 2)}
    for name, (parallelism, processes) in {**meshes, "huge": ("fsdp2", 1)}.items():
        text = EXPERIMENT.replace("PARALLELISM", parallelism).replace("PROCESSES", str(processes))
        (folder / f"{name}.yaml").write_text(text + (TOO_LARGE if name == "huge" else ""))
    names = "alone,ddp2,fsdp2x2,misfit,huge"
    command = [sys.executable, str(ROOT / "recipes" / "finetune.py"), "-m", f"experiment={names}", "run.dir=mine"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=bench.folder, env=environment, text=True, capture_output=True, timeout=280, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, 16 * 2**30)),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    sweep = bench.folder / "mine"
    assert states(sweep) == {
        "0_alone": "ok", "1_ddp2": "ok", "2_fsdp2x2": "ok", "3_misfit": "invalid", "4_huge": "oom",
    }, done.stdout  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("[")] == sorted(states(sweep))
    assert sum(line.split()[0] in states(sweep) for line in lines if line) == 5
    assert sum("ok, best" in line for line in lines) == 1
    assert "3_misfit: invalid: parallelism: tp 3 = 3 processes, but there are 2" in done.stdout
    assert "4_huge: oom: rank 0: RuntimeError" in done.stdout
    assert "can't allocate memory: you tried to allocate" in done.stdout
    (agreed,) = [line for line in lines if line.startswith("losses agree")]
    assert all(name in agreed for name in ("0_alone", "1_ddp2", "2_fsdp2x2"))
    for name in ("report.md", "report.png", "sweep.json", "0_alone.log", "4_huge.log", "0_alone/metrics.jsonl"):
        assert (sweep / name).exists(), name
    assert not (sweep / "3_misfit").exists()
    assert not list(sweep.glob("*/checkpoints"))  # experiment=bench_mesh saves no checkpoints
    bench.assert_no_process_left()


@in_torture
def test_sweep_continues_after_a_run_fails_in_any_way(bench: Bench) -> None:
    bench.write(
        RESULT
        + """
if seed == 1: raise ValueError("no such luck")
if seed == 2: raise ConfigError("data.path=x: has no rows")
if seed == 3: os.kill(os.getpid(), signal.SIGKILL)
if seed == 4: raise MemoryError
if seed == 5: os._exit(3)
if seed == 6: result(status="ok", tokens_per_second=10.0, first_loss=5.0, last_loss=4.0)
if seed == 7 and RANK == 1: raise ValueError("on the other rank")
"""
    )
    done = bench.run("-m", "run.seed=range(1,8)", "cluster.procs_per_node=1")
    assert done.status == 1
    sweep = only_sweep(bench)
    assert list(states(sweep).values()) == ["ok", "ok", "failed", "invalid", "failed", "oom", "failed"], done.output
    assert "2_3: failed" in done.output
    assert "1_2: invalid: data.path=x: has no rows" in done.output
    assert "ValueError: no such luck" in (sweep / "0_1.log").read_text()
    assert not (sweep / "1_2").exists()
    assert done.output.count("\n[") == 7
    bench.assert_no_process_left()


@in_torture
def test_killed_sweep_leaves_no_process_and_is_retried(bench: Bench) -> None:
    bench.write(
        RESULT
        + """
while seed == 2 and not (Path(__file__).parent / "release").exists():
    note("up")
    time.sleep(0.05)
result(status="ok", attempt=os.environ["MESHBOOK_ATTEMPT"])
"""
    )
    started = bench.start("-m", "run.seed=1,2,3", "cluster.procs_per_node=2", "run.dir=mine")
    bench.await_notes("up", 2)
    sweep = bench.folder / "mine"
    shown = report(sweep, cwd=bench.folder)
    assert shown.status == 0, shown.errors  # no run has failed so far
    assert states(sweep) == {"0_1": "ok", "1_2": "running", "2_3": "not started"}
    refused = report(sweep, "--retry", cwd=bench.folder)
    assert (refused.status, "still running" in refused.errors) == (2, True)
    watching = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "sweep_report.py"), str(sweep), "--watch"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watching.stdout
    while "running" not in watching.stdout.readline():
        pass
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait()
    watched = watching.communicate(timeout=60)[0]
    assert (watching.returncode, "interrupted" in watched) == (1, True)
    bench.assert_no_process_left()
    shown = report(sweep, cwd=bench.folder)
    assert shown.status == 1
    assert states(sweep) == {"0_1": "ok", "1_2": "interrupted", "2_3": "not started"}
    (bench.folder / "release").touch()
    again = report(sweep, "--retry", cwd=Path("/"))
    assert again.status == 0, again.output + again.errors
    assert states(sweep) == {"0_1": "ok", "1_2": "ok", "2_3": "ok"}
    assert (bench.folder / "started").read_text().split().count("1") == 2  # started once, on two ranks
    assert json.loads((sweep / "1_2" / "result.json").read_text())["attempt"] == "1"
    assert "nothing to retry" in report(sweep, "--retry", cwd=bench.folder).output


def test_killed_sweep_of_random_draws_is_retried_with_the_same_points(bench: Bench) -> None:
    bench.write(
        """
with (Path(__file__).parent / "started").open("a") as file:
    file.write(f"{cfg.optimizer.lr} {cfg.run.seed}\\n")
while "_1_" in f"_{Path(cfg.run.dir).name}" and not (Path(__file__).parent / "release").exists():
    note("up")
    time.sleep(0.05)
(Path(cfg.run.dir) / "result.json").write_text(json.dumps({"status": "ok"}))
"""
    )
    drawn = ("optimizer.lr=loguniform(1e-5,1e-1)", "run.seed=choice(3,4,5)", "sweep.draws=3", "sweep.seed=7")
    started = bench.start("-m", *drawn, "cluster.procs_per_node=1", "run.dir=mine")
    bench.await_notes("up", 1)
    sweep = bench.folder / "mine"
    plan = json.loads((sweep / "sweep.json").read_text())
    expected = [(float(each["values"]["optimizer.lr"]), int(each["values"]["run.seed"])) for each in plan["points"]]
    assert len(set(expected)) == 3
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait()
    bench.assert_no_process_left()
    (bench.folder / "release").touch()
    again = report(sweep, "--retry", cwd=bench.folder)
    assert again.status == 0, again.output + again.errors
    assert set(states(sweep).values()) == {"ok"}
    assert json.loads((sweep / "sweep.json").read_text()) == plan
    lines = [line.split() for line in (bench.folder / "started").read_text().splitlines()]
    assert [(float(lr), int(seed)) for lr, seed in lines] == [expected[number] for number in (0, 1, 1, 2)]
    for (lr, _), name in zip(expected, states(sweep), strict=True):
        config = yaml.safe_load((sweep / name / "config.yaml").read_text())
        assert float(config["optimizer"]["lr"]) == lr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_sweep_lets_its_run_save_and_starts_no_other(bench: Bench, number: signal.Signals) -> None:
    bench.write(
        RESULT
        + """
if seed == 2:
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append("interrupted"))
    signal.signal(signal.SIGTERM, lambda *_: stop.append("preempted"))
    note("up")
    while not stop:
        time.sleep(0.02)
    time.sleep(0.3)
    result(status=stop[0], signals=len(stop))
else:
    result(status="ok")
"""
    )
    started = bench.start("-m", "run.seed=1,2,3")
    bench.await_notes("up", 1)
    started.signal(number)
    done = started.wait()
    sweep = only_sweep(bench)
    stopped = "interrupted" if number == signal.SIGINT else "preempted"
    assert states(sweep) == {"0_1": "ok", "1_2": stopped, "2_3": "not started"}
    assert done.status == (130 if number == signal.SIGINT else 1)
    assert json.loads((sweep / "1_2" / "result.json").read_text())["signals"] == 1
    assert f"stopped by {number.name}" in done.output
    assert ("stopping after this step or the next; again to abort" in done.errors) == (number == signal.SIGINT)
    assert (bench.folder / "started").read_text().split() == ["1", "2"]
    bench.assert_no_process_left()


def test_run_that_ignores_ctrl_c_is_killed_by_the_third(bench: Bench) -> None:
    bench.write("signal.signal(signal.SIGINT, signal.SIG_IGN)\nnote('up')\ntime.sleep(600)")
    started = bench.start("-m", "run.seed=1,2")
    bench.await_notes("up", 1)
    for _ in range(3):
        started.signal(signal.SIGINT)
        time.sleep(0.3)  # pending signals of the same number are merged
    done = started.wait()
    assert done.status == 130
    bench.assert_no_process_left()


@in_torture
def test_sweep_is_judged_by_speed_and_by_any_metric(bench: Bench) -> None:
    """The keys of the sweep are in no run's config; the report judges the same points by other metrics as well."""
    bench.recipe.write_text((ROOT / "recipes" / "finetune.py").read_text())
    started = bench.start("-m", "optimizer.lr=1e-5,1e-2", "sweep.metric=tokens_per_second", "run.dir=mine", *SHORT)
    done = started.wait()
    assert done.status == 0, done.output + done.errors
    sweep = bench.folder / "mine"
    assert "best: by tokens/s, the maximum (sweep.metric)" in done.output
    assert "held-out loss" in next(line for line in done.output.splitlines() if line.startswith("run "))
    assert "sweep" not in yaml.safe_load((sweep / "0_1e-05" / "config.yaml").read_text())

    def column(name: str) -> list[float]:
        with (sweep / "report.csv").open() as file:
            return [float(row[name]) for row in csv.DictReader(file)]

    assert column("tokens_per_second") == sorted(column("tokens_per_second"), reverse=True)
    judged = report(sweep, "--metric", "loss", cwd=bench.folder)
    assert (judged.status, "best: by loss, the minimum (sweep.metric)" in judged.output) == (0, True), judged.errors
    assert column("loss") == sorted(column("loss"))
    assert len(set(column("eval_loss"))) == 2
    missing = report(sweep, "--metric", "bleu", "--goal", "max", cwd=bench.folder)
    assert missing.status == 1
    assert "sweep.metric=bleu: no point has this metric; choose from: " in missing.output
    assert report(sweep, "--metric", "bleu", cwd=bench.folder).status == 2


def test_runs_of_a_sweep_share_a_wandb_group_but_no_url_of_copies(bench: Bench) -> None:
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    bench.write("pass")
    remote = "checkpoint.remote=s3://bucket/${model.kind}"
    assert bench.run("-m", "run.seed=1,2", "logging.wandb.mode=offline", remote).status == 0
    sweep = only_sweep(bench)
    for name in ("0_1", "1_2"):
        config = yaml.safe_load((sweep / name / "config.yaml").read_text())
        assert (config["logging"]["wandb"]["group"], config["run"]["name"]) == (sweep.name, name)
        assert config["checkpoint"]["remote"] == f"s3://bucket/{config['model']['kind']}/{name}"


def test_dry_run_lists_the_points_and_writes_nothing(bench: Bench) -> None:
    bench.write("note('ran')")
    done = bench.run("-m", "parallelism=ddp,tp3", "cluster=local_2proc", "cluster.dry_run=true")
    assert done.status == 1
    assert "0_ddp: would start 2 x" in done.output
    assert "1_tp3: invalid: parallelism: tp 3" in done.output
    assert os.listdir(bench.folder) == ["tried.py"]


def test_cfg_job_prints_the_config_of_each_point(bench: Bench) -> None:
    bench.write("note('ran')")
    done = bench.complete("-m", "run.seed=7,8", "--cfg", "job")
    shown = done.output.splitlines()
    assert [line for line in shown if line.startswith(("# ", "  seed: "))] == [
        "# 0_7", "  seed: 7", "  seed: 0", "# 1_8", "  seed: 8", "  seed: 0",
    ]  # fmt: skip  # the second is generation.seed
    assert os.listdir(bench.folder) == ["tried.py"]


def test_sweep_directory_with_other_files_is_rejected(bench: Bench) -> None:
    bench.write("pass")
    (bench.folder / "mine").mkdir()
    (bench.folder / "mine" / "precious").touch()
    done = bench.run("-m", "run.seed=1,2", "run.dir=mine")
    assert (done.status, done.output) == (2, "")
    assert "run.dir=mine: contains files" in done.errors
    assert os.listdir(bench.folder / "mine") == ["precious"]
