"""Optuna studies and parallel points as a user starts them, with recipes that compute a loss instead of training."""

from __future__ import annotations

import csv
import json
import os
import signal

import pytest

from tests.recipes.launching import Bench, until
from tests.recipes.test_sweep import ROOT, report, states

optuna = pytest.importorskip("optuna", reason="needs the extra `optuna`")
from optuna.storages import JournalStorage  # noqa: E402
from optuna.storages.journal import JournalFileBackend  # noqa: E402

STUDY = ("-m", "optimizer.lr=loguniform(1e-5,1e-1)", "run.dir=mine", "sweep.seed=3", "cluster.procs_per_node=1")
LOSS = """
import math
HERE = Path(__file__).parent
RUN = Path(cfg.run.dir)
number = int(RUN.name.split("_")[0])
lr = cfg.optimizer.lr
loss = abs(math.log10(lr) + 3)

def end(**values):
    (RUN / "result.json").write_text(json.dumps({"status": "ok", "eval_loss": loss, **values}))

with (HERE / "started").open("a") as file:
    file.write(f"{number} ")
"""
"""The first lines of a main whose loss is lowest for a learning rate of 1e-3."""


def started(bench: Bench) -> list[int]:
    """Return the numbers of the points in the order of their starts."""
    return [int(number) for number in (bench.folder / "started").read_text().split()]


def column(bench: Bench, name: str) -> dict[int, str]:
    """Return a column of the table by the number of the point."""
    with (bench.folder / "mine" / "report.csv").open() as file:
        return {int(row["run"].split("_")[0]): row[name] for row in csv.DictReader(file)}


def test_killed_study_continues_without_repeating_a_finished_point(bench: Bench) -> None:
    """Points 0 and 1 finish, 2 fails, and the sweep is killed in point 3. A retry of point 2 adds its result.

    The command is refused without any change while the study runs. A metric of the report is not that of the study.
    """
    bench.write(
        LOSS
        + """
if number == 2 and not (HERE / "mended").exists():
    raise ValueError("no such luck")
while number == 3 and not (HERE / "release").exists():
    note("up")
    time.sleep(0.02)
end(attempt=os.environ["MESHBOOK_ATTEMPT"], score=100.0)
"""
    )
    killed = bench.start(*STUDY, "sweep.trials=5")
    bench.await_notes("up", 1)
    before = (bench.folder / "mine" / "sweep.json").read_bytes()
    refused = bench.run(*STUDY, "sweep.trials=9")
    assert (refused.status, "this sweep is still running" in refused.errors) == (2, True), refused.errors
    assert (bench.folder / "mine" / "sweep.json").read_bytes() == before
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    bench.assert_no_process_left()
    (bench.folder / "release").touch()
    done = bench.run(*STUDY, "sweep.trials=5")
    assert done.status == 1, done.errors  # point 2 has failed
    assert "5 points, 3 of which have ended" in done.output
    assert started(bench) == [0, 1, 2, 3, 3, 4]
    assert json.loads((bench.folder / "mine" / column(bench, "run")[3] / "result.json").read_text())["attempt"] == "1"
    losses = {number: float(value) for number, value in column(bench, "eval_loss").items() if value}
    assert column(bench, "status") == {0: "ok", 1: "ok", 2: "failed", 3: "ok", 4: "ok"}
    best = next(number for number, value in column(bench, "best").items() if value == "True")
    assert losses[best] == min(losses.values())
    assert "best: by held-out loss, the minimum (sweep.metric)" in done.output
    (bench.folder / "mended").touch()
    retried = report(bench.folder / "mine", "--retry", "--metric", "score", "--goal", "max", cwd=bench.folder)
    assert retried.status == 0, retried.output
    assert "[3/5] 2_" in retried.output
    assert "best: by score, the maximum (sweep.metric)" in retried.output
    journal = JournalStorage(JournalFileBackend(str(bench.folder / "mine" / "optuna.journal")))
    trials = optuna.load_study(study_name="sweep", storage=journal).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", *["COMPLETE"] * 3]
    found = {number: pytest.approx(float(value)) for number, value in column(bench, "eval_loss").items()}
    assert [trial.value for trial in trials] == [found[0], found[1], None, found[3], found[4], found[2]]


def test_other_settings_do_not_continue_a_study(bench: Bench) -> None:
    bench.write(LOSS + "end()")
    assert bench.run(*STUDY, "sweep.trials=2", "sweep.parallel=2").status == 0
    before = sorted((bench.folder / "mine").rglob("*"))
    other = bench.run(*STUDY[:-1], "sweep.trials=3", "training.max_steps=7", "sweep.metric=loss")
    assert other.status == 2
    assert "run.dir=mine: holds a study whose command differs in cluster.procs_per_node=1, " in other.errors
    assert "training.max_steps=7, sweep.metric; give the same (" in other.errors
    assert sorted((bench.folder / "mine").rglob("*")) == before
    assert bench.run(*STUDY, "sweep.trials=3").status == 0
    assert started(bench) == [0, 1, 2]


def test_study_ends_if_points_do_not_measure_its_metric(bench: Bench) -> None:
    bench.write(LOSS + "end(score=1.0)")
    done = bench.run(*STUDY, "sweep.trials=5", "sweep.metric=bleu", "sweep.goal=max")
    assert (done.status, started(bench)) == (1, [0])
    assert "sweep.metric=bleu: no point has this metric; choose from: eval_loss, score" in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_parallel_points_share_the_cores_and_stop_together(bench: Bench, number: signal.Signals) -> None:
    bench.write(
        LOSS
        + """
(HERE / f"up_{number}").write_text(os.environ["OMP_NUM_THREADS"])
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append("interrupted"))
signal.signal(signal.SIGTERM, lambda *_: stop.append("preempted"))
while not stop:
    time.sleep(0.02)
end(status=stop[0], signals=len(stop))
"""
    )
    begun = bench.start(*STUDY, "sweep.trials=4", "sweep.parallel=2")
    bench.await_notes("up", 2)
    begun.signal(number)
    done = begun.wait()
    stopped = "interrupted" if number == signal.SIGINT else "preempted"
    assert list(states(bench.folder / "mine").values()) == [stopped, stopped], done.output
    assert done.status == (130 if number == signal.SIGINT else 1)
    results = [json.loads(file.read_text()) for file in bench.folder.glob("mine/*/result.json")]
    assert [each["signals"] for each in results] == [1, 1]
    assert "sweep.parallel=2" in next(line for line in done.output.splitlines() if "continue it: " in line)
    bench.assert_no_process_left()


def test_losing_point_is_stopped_early_and_a_row_of_the_table(bench: Bench) -> None:
    """The held-out loss is lr, and the median of the first four points 2.5: the point of 9 stops, that of 0.5 not.

    Only a retry of points that were stopped early trains it to the end.
    """
    bench.write(
        LOSS
        + """
from components.config.stored_run import MetricsLog
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append("preempted"))
MetricsLog(RUN).append({"step": 20, "eval_loss": lr})
if number >= 4:
    seconds = time.monotonic() + (2.5 if lr < 1 or (HERE / "retried").exists() else 200)
    while not stop and time.monotonic() < seconds:
        time.sleep(0.02)
if not stop:
    MetricsLog(RUN).append({"step": 40, "eval_loss": lr})
end(status=stop[0] if stop else "ok", eval_loss=lr)
"""
    )
    command = ("-m", "run.dir=mine", "cluster.procs_per_node=1", "optimizer.lr=1,2,3,4,0.5,9", "sweep.parallel=2")
    done = bench.complete(*command, "sweep.early_stop=median")
    assert states(bench.folder / "mine") == {
        **dict.fromkeys(("0_1", "1_2", "2_3", "3_4", "4_0.5"), "ok"),
        "5_9": "stopped early",
    }
    reason = "eval_loss is 9 at best up to step 20; the median of "
    assert column(bench, "reason")[5].startswith(reason)
    assert f"5_9: stopped early: {reason}" in done.output
    assert column(bench, "eval_loss")[5] == "9.0"
    assert report(bench.folder / "mine", "--retry", cwd=bench.folder).status == 0
    assert started(bench).count(5) == 1
    (bench.folder / "retried").touch()
    retried = report(bench.folder / "mine", "--retry", "stopped early", cwd=bench.folder)
    assert retried.status == 0, retried.output + retried.errors
    assert states(bench.folder / "mine")["5_9"] == "ok"


@pytest.mark.skipif(os.environ.get("MESHBOOK_TORTURE") != "1", reason="trains 20 models: make torture")
def test_study_of_20_trained_points_is_killed_half_way(bench: Bench) -> None:
    """Two points at a time; no finished point starts again, and the 10 chosen points beat the 10 random ones."""
    bench.recipe.write_text((ROOT / "recipes" / "finetune.py").read_text())
    command = (
        *("-m", "optimizer.lr=loguniform(1e-5,1e-1)", "training.max_grad_norm=0.3,1,3", "run.dir=mine"),
        *("sweep.trials=20", "sweep.parallel=2", "parallelism=single", "cluster.device=cpu", "checkpoint.every=4"),
        *("training.max_steps=12", "training.eval_every=4", "training.seq_len=64", "training.global_batch_size=4"),
        *("data.max_samples=256", "data.max_eval_samples=8", "checkpoint.export=false", "generation.samples=0"),
    )
    sweep = bench.folder / "mine"
    killed = bench.start(*command)
    until(lambda: len(list(sweep.glob("*/result.json"))) >= 10)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    bench.assert_no_process_left()
    finished = {file: file.stat().st_mtime_ns for file in sweep.glob("*/result.json")}
    bench.complete(*command)
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    losses = {number: float(loss) for number, loss in column(bench, "eval_loss").items()}
    assert sorted(losses) == list(range(20))
    assert sum(losses[number] for number in range(10, 20)) < sum(losses[number] for number in range(10))
    assert (sweep / "sweep.png").exists()
