"""The results table of a sweep, built only from files."""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.config.compose.sweep_keys import Goal, SweepConfig
from components.config.stored_run import MetricsLog
from components.launch.slurm.submit import _GONE, _UNKNOWN
from components.launch.sweep.plan import (
    Point,
    PointRecord,
    Sweep,
    SweepRow,
    _state_with_job,
    locked,
    read_points,
    write_record,
)
from components.launch.sweep.ranking import _ACCURACY, print_table, read_report, to_csv, to_markdown
from components.launch.sweep.report import exit_status, report_now
from tests.unit.full_disk import full_disk

GIB = 2**30
CONFIG = """
run: {dir: DIR, name: null, seed: 42}
parallelism: {strategy: STRATEGY}
training: {max_steps: 3, micro_batch_size: 2}
optimizer: {lr: LR}
"""


class SweepFiles:
    """A sweep in a folder, with points whose results the test chooses."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        directory.mkdir()
        points = [Point(n, f"{n}_{name}", {"parallelism": name}, [], "tp=2", 2) for n, name in enumerate(names)]
        self.sweep = Sweep(
            directory, "id", "finetune", Path("/r.py"), Path("/"), "python r.py -m", [], ["parallelism"], points
        )
        self.sweep.write()

    def finish(
        self, number: int, *, record: PointRecord | None = None, lr: float = 1e-4, job: str | None = None, **result: Any
    ) -> None:
        """Write the files of a started point, with this result.json or none."""
        point = self.sweep.points[number]
        run_dir = self.sweep.run_dir(point)
        run_dir.mkdir()
        text = CONFIG.replace("DIR", str(run_dir)).replace("STRATEGY", point.name).replace("LR", str(lr))
        (run_dir / "config.yaml").write_text(text)
        if result:
            (run_dir / "result.json").write_text(json.dumps(result))
        if job:
            (run_dir / "job_id").write_text(f"{job}\n")
        write_record(self.sweep, point, record or PointRecord(time.time(), 0, 4.0))

    def finish_ok(self, number: int, speed: float, loss: float, **more: Any) -> None:
        """Write the files of a successful point."""
        values: dict[str, Any] = {"wall_seconds": 3.0, "compute_dtype": "float32", "first_loss": 5.0}
        values |= {"mesh": "pp=1 x dp_shard=2 x tp=2", "processes": 4, "peak_memory_bytes": GIB}
        lr = more.pop("lr", 1e-4)
        values |= {"tokens_per_second": speed, "last_loss": loss, **more}
        self.finish(number, lr=lr, status="ok", **values)

    def result(self, number: int, **values: Any) -> None:
        """Change values in the result.json of a point."""
        file = self.sweep.run_dir(self.sweep.points[number]) / "result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    def config(self, number: int, lines: str) -> None:
        """Append lines to the config.yaml of a point."""
        with (self.sweep.run_dir(self.sweep.points[number]) / "config.yaml").open("a") as file:
            file.write(f"{lines}\n")

    def rows(self) -> list[SweepRow]:
        """Return the rows in the order of the sweep."""
        return read_points(self.sweep)

    def printed(self) -> str:
        """Return the printed table."""
        console = Console(width=200, record=True, quiet=False, file=io.StringIO())
        print_table(read_report(self.sweep), console)
        return console.export_text()


def test_fastest_point_comes_first_and_is_marked_best(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2", "tp2", "tp3"))
    files.finish_ok(0, 1000.0, 4.0)
    files.finish_ok(1, 2000.0, 4.0001)
    files.finish(2, record=PointRecord(1.0, 1, 2.0), status="oom", error="rank 1: MemoryError: no more\nand more of it")
    report = read_report(files.sweep)
    assert [row.point.name for row in report.rows] == ["1_fsdp2", "0_ddp", "2_tp2", "3_tp3"]
    lines = [" ".join(line.split()) for line in files.printed().splitlines()]
    assert lines[0] == "run parallelism mesh processes tokens/s per process peak GiB last loss wall s status"
    assert lines[1] == "1_fsdp2 fsdp2 dp_shard=2 x tp=2 4 2,000 500 1.00 4.0001 3.0 ok, best"
    assert lines[3] == "2_tp2 tp2 tp=2 2 2.0 oom"
    assert lines[4] == "3_tp3 tp3 tp=2 2 not started"
    assert lines[5] == "2_tp2: oom: rank 1: MemoryError: no more"
    assert lines[6].startswith("losses agree: 1_fsdp2, 0_ddp train one curve, at most 2.5e-05 apart (allowed: 1e-04")
    assert exit_status(report) == 1


def test_points_of_different_curves_are_compared_by_what_they_learned(tmp_path: Path) -> None:
    """By held-out loss under one objective, by held-out accuracy under several, and not at all on different data."""
    files = SweepFiles(tmp_path / "s", ("a", "b", "c"))
    files.finish_ok(0, 1000.0, 4.0, lr=1e-4, eval_loss=3.9, eval_accuracy=0.7)
    files.finish_ok(1, 2000.0, 4.5, lr=2e-4, eval_loss=4.1, eval_accuracy=0.8)
    files.finish_ok(2, 3000.0, 4.5, lr=3e-4, eval_loss=float("nan"), eval_accuracy=0.6)
    assert read_report(files.sweep).criterion == _ACCURACY  # one point has no held-out loss
    files.result(2, eval_loss=4.0)
    report = read_report(files.sweep)
    assert [row.point.name for row in report.rows] == ["0_a", "2_c", "1_b"]
    lines = [" ".join(line.split()) for line in files.printed().splitlines()]
    assert "last loss held-out loss wall s" in lines[0]
    assert lines[1].endswith("4.0000 3.9000 3.0 ok, best")
    assert lines[-1] == "best: by held-out loss, since the points train different curves"

    files.config(1, "objective: {beta: 0.3}")
    report = read_report(files.sweep)
    assert [row.point.name for row in report.rows] == ["1_b", "0_a", "2_c"]
    lines = [" ".join(line.split()) for line in files.printed().splitlines()]
    assert lines[1].endswith("4.5000 4.1000 80.0% 3.0 ok, best")
    best = next(row for row in csv.DictReader(io.StringIO(to_csv(report))) if row["best"] == "True")
    assert (best["run"], best["eval_accuracy"], best["eval_loss"]) == ("1_b", "0.8", "4.1")

    files.config(0, "data: {path: other}")
    report = read_report(files.sweep)
    assert report.best is None
    assert report.lines()[-1].startswith("best: not chosen, since the points' objectives or data differ")


def test_points_are_judged_by_any_metric_of_their_logs_and_results(tmp_path: Path) -> None:
    """The last value counts, also a point's last value that is not finite, which cannot be the best."""
    files = SweepFiles(tmp_path / "s", ("a", "b", "c", "d"))
    for number, values in enumerate(([0.9, 0.3], [0.1, 0.5], [0.7, float("nan")], [])):
        files.finish_ok(number, 1000.0 + number, 4.0, lr=number, eval_loss=5.0, peak=number)
        log = MetricsLog(files.sweep.run_dir(files.sweep.points[number]))
        for step, value in enumerate(values):
            log.append({"step": step, "score": value})
    expected = {
        ("score", Goal.max): ["1_b", "0_a", "3_d", "2_c"],  # points without it: the fastest first
        ("score", Goal.min): ["0_a", "1_b", "3_d", "2_c"],
        ("peak", Goal.min): ["0_a", "1_b", "2_c", "3_d"],
        ("tokens_per_second", Goal.max): ["3_d", "2_c", "1_b", "0_a"],
    }
    for (metric, goal), names in expected.items():
        report = read_report(replace(files.sweep, metric=metric, goal=goal))
        assert [row.point.name for row in report.rows] == names, (metric, goal)
        assert report.best is report.rows[0]
        assert exit_status(report) == 0
    report = read_report(replace(files.sweep, metric="score", goal=Goal.max))
    assert report.lines()[-3:] == [
        "3_d: has no score, so it cannot be the best",
        "2_c: has no score, so it cannot be the best",
        "best: by score, the maximum (sweep.metric)",
    ]
    assert "| held-out loss | score | wall s |" in to_markdown(report)
    assert [row["score"] for row in csv.DictReader(io.StringIO(to_csv(report)))] == ["0.5", "0.3", "", ""]


def test_metric_that_no_point_has_is_an_error_of_the_report(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("a", "b"))
    sweep = replace(files.sweep, metric="bleu", goal=Goal.max)
    assert not read_report(sweep).problem  # no point has ended
    for number in range(2):
        files.finish_ok(number, 1000.0, 4.0, step_seconds=0.5)
    report = read_report(sweep)
    assert report.best is None
    assert exit_status(report) == 1
    assert report.lines()[-1].startswith("best: not chosen: sweep.metric=bleu: no point has this metric; choose from: ")
    assert "last_loss, peak_memory_bytes, processes, step_seconds, tokens_per_second, wall_seconds" in report.problem


def test_diverged_points_do_not_prevent_a_best_one(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("a", "b", "c"))
    for number, loss in enumerate((float("nan"), 3.0, 2.5)):
        files.finish_ok(number, 1000.0, 4.0, lr=number, eval_loss=loss)
    report = read_report(files.sweep)
    assert [row.point.name for row in report.rows] == ["2_c", "1_b", "0_a"]
    assert "0_a: has no held-out loss, so it cannot be the best" in report.lines()


def test_markdown_and_csv_contain_the_same_values(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2"))
    files.finish_ok(0, 1000.0, 4.0, mfu=0.4, peak_reserved_bytes=3 * GIB)
    files.finish_ok(1, 900.25, 4.0)
    report = read_report(files.sweep)
    markdown = to_markdown(report).splitlines()
    columns = (
        "run | parallelism | mesh | processes | tokens/s | per process | MFU | peak GiB | reserved GiB | last loss"
    )
    assert markdown[4].startswith(f"| {columns} |")
    assert "| **0_ddp** |" in markdown[6]
    assert "| **40.0%** | **1.00** | **3.00** |" in markdown[6]
    assert "| 1.00 |  | 4.0000 |" in markdown[7]
    (first, second) = csv.DictReader(io.StringIO(to_csv(report)))
    assert (first["tokens_per_second"], first["mfu"], first["best"]) == ("1000.0", "0.4", "True")
    assert (second["tokens_per_second"], second["mfu"], second["best"]) == ("900.25", "", "False")
    assert [row["peak_reserved_gib"] for row in (first, second)] == ["3.0", ""]
    assert (second["parallelism"], second["peak_memory_gib"], second["status"]) == ("fsdp2", "1.0", "ok")
    assert exit_status(report) == 0


def test_estimates_are_shown_beside_the_measured_figures(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2"))
    planned = {"gpu": "h100_80", "peak_memory_bytes": 2 * GIB, "step_seconds": 0.4}
    files.finish_ok(0, 1000.0, 4.0, step_seconds=0.5, planned=planned)
    files.finish_ok(1, 900.25, 4.0, step_seconds=0.6)
    report = read_report(files.sweep)
    markdown = to_markdown(report).splitlines()
    assert "| peak GiB | planned GiB | step s | planned s | last loss |" in markdown[4]
    assert "| **1.00** | **2.00** | **0.5** | **0.4** |" in markdown[6]
    (first, second) = csv.DictReader(io.StringIO(to_csv(report)))
    assert (first["planned_memory_gib"], first["planned_step_seconds"], first["step_seconds"]) == ("2.0", "0.4", "0.5")
    assert (second["planned_memory_gib"], second["step_seconds"]) == ("", "0.6")


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_narrow_console_leaves_columns_out_instead_of_cutting_cells(width: int, tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("fsdp2_tp2_a_long_name", "ddp"))
    files.finish_ok(0, 1234567.0, 4.0)
    files.finish_ok(1, 900.25, 4.0)
    console = Console(width=width, record=True, file=io.StringIO())
    print_table(read_report(files.sweep), console)
    printed = console.export_text()
    columns = {"tokens/s", "per process", "wall s", "processes", "peak GiB", "last loss", "parallelism", "mesh"}
    table, _, left_out = printed.partition("only in report.md, since the terminal has")
    listed = {name for name in columns if name in left_out}
    assert "…" not in printed
    assert all(word in table for name in columns - listed for word in name.split())
    assert {"0_fsdp2_tp2_a_long_name", "1,234,567", "900"} <= set(table.split())
    assert max(map(len, table.split("losses")[0].splitlines())) <= width
    assert bool(listed) == (width < 200)


def test_report_write_failure_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = SweepFiles(tmp_path / "sweep", ("a",))
    files.finish(0, status="ok")
    assert report_now(files.sweep) == 0
    capsys.readouterr()
    with full_disk():
        assert report_now(files.sweep) == 1
    output = capsys.readouterr()
    assert f"{files.sweep.directory}/report.md: cannot be written: File too large; fix that, then run: " in output.err
    assert "0_a" in output.out
    assert "report: " not in output.out


def test_disagreeing_loss_is_flagged_and_never_the_best(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2", "tp2"))
    files.finish_ok(0, 3000.0, 4.01)
    files.finish_ok(1, 2000.0, 4.0)
    files.finish_ok(2, 1000.0, 4.0)
    report = read_report(files.sweep)
    assert report.agreement.disagreeing == {0}
    output = files.printed()
    assert [line.split()[0] for line in output.splitlines()[1:4]] == ["1_fsdp2", "2_tp2", "0_ddp"]
    assert "ok, best" in output.splitlines()[1]
    assert "ok, LOSS DISAGREES" in output.splitlines()[3]
    assert [row["best"] for row in csv.DictReader(io.StringIO(to_csv(report)))] == ["True", "False", "False"]
    assert "losses DISAGREE: last_loss of 0_ddp is 4.01, of 1_fsdp2 4.0: 2.5e-03 apart, more than 1e-04" in output
    assert "losses agree" not in output
    assert exit_status(report) == 1


@pytest.mark.parametrize(
    ("dtype", "other", "agrees"),
    [
        ("float64", 4.0 * (1 + 5e-10), True),
        ("float64", 4.0 * (1 + 5e-9), False),
        ("float32", 4.0 * (1 + 5e-5), True),
        ("float32", 4.0 * (1 + 5e-4), False),
        ("bfloat16", 4.0 * (1 + 1e-2), True),
        ("bfloat16", 4.0 * (1 + 3e-2), False),
        (None, 4.0 * (1 + 1e-2), True),
        ("float32", float("nan"), False),
    ],
)
@pytest.mark.parametrize("compared", ["last_loss", "first_loss", "eval_loss"])
def test_loss_tolerance_depends_on_compute_dtype(
    tmp_path: Path, dtype: str | None, other: float, agrees: bool, compared: str
) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2"))
    for number, loss in enumerate((4.0, other)):
        files.finish_ok(number, 1000.0, **{"loss": 4.0, "compute_dtype": dtype, "last_loss": 4.0, compared: loss})
    assert (not read_report(files.sweep).agreement.disagreeing) == agrees


@pytest.mark.parametrize(
    ("steps", "early", "held_out", "disagreeing"),
    [
        (200, 4.0, 5.0, set()),  # last losses differ by 1.2e-3, as observed from rounding over 200 steps
        (50, 4.0, 5.0, {0, 1}),
        (200, 4.001, 5.0, {0, 1}),
        (200, float("nan"), 5.0, {0, 1}),
        (200, 4.0, 5.001, {0, 1}),
    ],
)
def test_late_rounding_differences_are_tolerated_after_many_steps(
    tmp_path: Path, steps: int, early: float, held_out: float, disagreeing: set[int]
) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2"))
    for number, (loss, last, first) in enumerate(((4.0, 3.0, 5.0), (early, 3.0 * (1 + 1.2e-3), held_out))):
        files.finish_ok(number, 1000.0, last, steps=steps, first_eval_loss=first, eval_loss=last)
        log = MetricsLog(files.sweep.run_dir(files.sweep.points[number]))
        for step, value in ((10, 4.5), (50, loss), (60, last)):
            log.append({"step": step, "loss": value, "tokens_per_second": 1.0})
    report = read_report(files.sweep)
    assert report.agreement.disagreeing <= disagreeing
    assert bool(report.agreement.disagreeing) == bool(disagreeing), report.agreement.notes


def test_losses_are_compared_only_between_points_with_equal_training_config(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2", "tp2", "tp4"))
    files.finish_ok(0, 1000.0, 4.0)
    files.finish_ok(1, 1000.0, 3.0, lr=2e-4)
    assert "losses: not compared" in files.printed()
    files.finish_ok(2, 1000.0, 3.0, lr=2e-4)
    files.finish_ok(3, 1000.0, 4.0)
    assert not read_report(files.sweep).agreement.disagreeing
    assert files.printed().count("losses agree") == 2


@pytest.mark.parametrize(
    ("record", "result", "state", "reason"),
    [
        (PointRecord(1.0, 2, 1.0, "training.max_steps=0: must be ..."), {}, "invalid", "training.max_steps=0"),
        (PointRecord(1.0, 2, 1.0, "wrong"), {"status": "failed"}, "invalid", "wrong"),
        (PointRecord(1.0, 2, 1.0, "mesh ...\n2 problems with this run:\na=1: x\nb=2: y"), {}, "invalid",
         "a=1: x; b=2: y"),
        (PointRecord(1.0, 1, 1.0, "Traceback\nValueError: no"), {}, "failed", "ValueError: no"),
        (PointRecord(1.0, 1, 1.0, "Traceback\nMemoryError: x"), {}, "oom", "MemoryError"),
        (PointRecord(1.0, -9, 1.0, "", killed_for_memory=True), {}, "oom", "memory ran out"),
        (PointRecord(1.0, -9, 1.0, "prompt: Why?", killed_for_memory=True), {}, "oom", "memory ran out"),
        (PointRecord(1.0, -9, 1.0, ""), {}, "failed", "was ended by SIGKILL"),
        (PointRecord(1.0, -9, 1.0, "step 7  loss 2.0718"), {}, "failed", "was ended by SIGKILL"),
        (PointRecord(1.0, 3, 1.0, ""), {}, "failed", "exited with status 3 without output"),
        (PointRecord(1.0, 130, 1.0, "interrupted"), {}, "interrupted", "interrupted"),
        (PointRecord(1.0), {}, "interrupted", "the sweep ended while"),
        (PointRecord(1.0), {"status": "ok"}, "ok", ""),
        (PointRecord(1.0, 0, 1.0), {}, "ok", ""),
        (PointRecord(1.0, 0, 1.0), {"status": "preempted"}, "preempted", ""),
        (PointRecord(1.0, 1, 1.0), {"status": "failed", "error": "rank 0: x"}, "failed", "rank 0: x"),
        (PointRecord(1.0, 75, 1.0), {"status": "hung", "error": "no progress for 9 s"}, "hung", "no progress for 9 s"),
        (PointRecord(1.0, 0, 1.0), {"status": "what?"}, "failed", "what?"),
    ],
)  # fmt: skip
def test_state_of_local_point_combines_note_and_result(
    tmp_path: Path, record: PointRecord, result: dict[str, Any], state: str, reason: str
) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp",))
    files.finish(0, record=record, **result)
    (row,) = files.rows()
    assert (row.state, reason in row.reason) == (state, True), row.reason


def test_running_point_reports_its_progress(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2"))
    files.finish(0, record=PointRecord(time.time() + 60), status="failed")  # result of an earlier start
    log = MetricsLog(files.sweep.run_dir(files.sweep.points[0]))
    log.append({"step": 7, "loss": 3.25, "tokens_per_second": 1234.5})
    log.append({"step": 7, "eval_loss": 3})
    with log.path.open("a") as file:
        file.write('{"st')
    with locked(files.sweep.directory):
        running, waiting = files.rows()
        assert (running.state, running.reason) == ("running", "step 7, loss 3.2500, 1,234 tokens/s")
        assert waiting.state == "not started"
        assert exit_status(read_report(files.sweep)) == 0
    assert [row.state for row in files.rows()] == ["failed", "not started"]
    assert exit_status(read_report(files.sweep)) == 1


@pytest.mark.parametrize(
    ("result", "job", "state"),
    [
        *((None, job, job) for job in ("submitted", "running", "oom", "timeout")),
        *((None, "ended", "failed"), (None, _GONE, "failed"), (None, _UNKNOWN, "submitted"), ("ok", "running", "ok")),
        *(("preempted", job, job) for job in ("submitted", "running", "timeout", "cancelled")),
        *(("preempted", job, "preempted") for job in ("ended", _UNKNOWN)),
        *(("failed", job, job) for job in ("submitted", "oom", "failed")),
        *((result, "failed", result) for result in ("oom", "hung")),
        ("cancelled", "cancelled", "cancelled"),
    ],
)
def test_state_combines_result_and_job_state(result: str | None, job: str, state: str) -> None:
    assert _state_with_job(result, job) == state


def test_start_that_submitted_no_job_has_its_own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm commands: the state of an older job is unknown
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2"))
    files.finish(0, job="14", record=PointRecord(1.0, 2, 1.0, "sbatch rejects it"))  # submitted again in vain
    files.finish(1, job="15", record=PointRecord(1.0, 1, 1.0, "OSError: disk full"))
    assert [(row.state, row.seconds) for row in files.rows()] == [("invalid", None), ("failed", None)]
    assert exit_status(read_report(files.sweep)) == 1


def finish_rewarded(files: SweepFiles, number: int, rewards: tuple[float, ...], **more: Any) -> None:
    """Write the files of a successful point with these rewards of steps, whose loss is rounding noise."""
    values = {"first_loss": 1e-9 * number, "first_reward": rewards[0], "last_reward": rewards[-1]}
    files.finish_ok(number, 1000.0, -1e-9, **{**values, "steps": len(rewards), **more})
    log = MetricsLog(files.sweep.run_dir(files.sweep.points[number]))
    for step, reward in enumerate(rewards, 1):
        log.append({"step": step, "reward": reward, "loss": 1e-9 * number, "tokens_per_second": 1000.0})


def test_points_with_rewards_are_ranked_by_the_highest_held_out_reward(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("a", "b", "c"))
    for number, reward in enumerate((0.25, 0.75, 0.5)):
        finish_rewarded(files, number, (0.1, 0.2), lr=(1 + number) * 1e-4, eval_reward=reward)
    report = read_report(files.sweep)
    assert [row.point.name for row in report.rows] == ["1_b", "2_c", "0_a"]
    lines = [" ".join(line.split()) for line in files.printed().splitlines()]
    assert "peak GiB last reward held-out reward wall s status" in lines[0]
    assert "loss" not in lines[0]
    assert lines[1].endswith("1.00 0.2000 0.7500 3.0 ok, best")
    assert lines[-1] == "best: by held-out reward, since the points train different curves"
    row = next(csv.DictReader(io.StringIO(to_csv(report))))
    assert (row["last_reward"], row["eval_reward"], row["last_loss"]) == ("0.2", "0.75", "")

    files.config(1, "objective: {kind: dapo}")  # another objective: rewards may be of another kind
    assert read_report(files.sweep).best is None


def test_metric_named_reward_beside_a_loss_is_no_reward(tmp_path: Path) -> None:
    """As KTO's; sweep.metric may judge by it, and the table then shows it."""
    files = SweepFiles(tmp_path / "s", ("a", "b"))
    for number in range(2):
        files.finish_ok(number, 1000.0, 4.0, lr=(1 + number) * 1e-4, eval_loss=2.0 + number)
        log = MetricsLog(files.sweep.run_dir(files.sweep.points[number]))
        log.append({"step": 1, "loss": 4.0, "reward": number / 4})
        log.append({"step": 1, "eval_loss": 2.0, "eval_reward": number / 2})
    assert [row.point.name for row in read_report(files.sweep).rows] == ["0_a", "1_b"]
    assert "reward" not in files.printed()
    judged = replace(files.sweep, metric="eval_reward", goal=SweepConfig(metric="eval_reward").direction)
    report = read_report(judged)
    assert [row.point.name for row in report.rows] == ["1_b", "0_a"]
    assert "| eval_reward |" in to_markdown(report)
    assert [row["eval_reward"] for row in csv.DictReader(io.StringIO(to_csv(report)))] == ["0.5", "0.0"]


@pytest.mark.parametrize(
    ("dtype", "other", "note", "status"),
    [
        ("float64", (0.1, 0.2, 0.3), "rewards agree: 0_ddp, 1_fsdp2, 2_tp2 train one curve, bit-equal", "ok"),
        ("float64", (0.1, 0.21, 0.3), "rewards DISAGREE: reward of step 2 of ", "ok, REWARD DISAGREES"),
        ("float64", (0.11, 0.2, 0.3), "rewards DISAGREE: first_reward of ", "ok, REWARD DISAGREES"),
        ("bfloat16", (0.1, 0.2, 0.3), "rewards agree: 0_ddp, 1_fsdp2, 2_tp2 train one curve, bit-equal", "ok"),
        ("float32", (0.1, 0.2, 0.4), "rewards differ: 0_ddp, 1_fsdp2, 2_tp2 train one curve, but in float32 ", "ok"),
    ],
)
def test_meshes_are_compared_by_rewards_and_differ_only_in_float64(
    dtype: str, other: tuple[float, ...], note: str, status: str, tmp_path: Path
) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp", "fsdp2", "tp2"))
    for number, rewards in enumerate(((0.1, 0.2, 0.3), (0.1, 0.2, 0.3), other)):
        finish_rewarded(files, number, rewards, compute_dtype=dtype)
    report = read_report(files.sweep)
    assert any(line.startswith(note) for line in report.lines()), report.lines()
    assert not any("losses" in line for line in report.lines())
    assert report.status(next(row for row in report.rows if row.point.number == 2)) == status
    assert exit_status(report) == ("DISAGREES" in status)


def test_running_point_with_rewards_reports_its_reward(tmp_path: Path) -> None:
    files = SweepFiles(tmp_path / "s", ("ddp",))
    files.finish(0, record=PointRecord(time.time() + 60))
    log = MetricsLog(files.sweep.run_dir(files.sweep.points[0]))
    log.append({"step": 0, "eval_reward": 0.25})
    log.append({"step": 7, "reward": 0.5, "loss": 0.0, "tokens_per_second": 1234.5})
    with locked(files.sweep.directory):
        assert [row.reason for row in files.rows()] == ["step 7, reward 0.5000, 1,234 tokens/s"]


def test_plots_of_a_sweep_with_rewards_show_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    from components.launch.sweep import report as drawn

    figures: dict[str, Any] = {}
    monkeypatch.setattr(drawn, "save_figure", lambda figure, file: figures.update({file.name: figure}))
    files = SweepFiles(tmp_path / "s", ("a", "b"))
    for number in range(2):
        finish_rewarded(files, number, (0.01, 0.5 + number / 4), lr=(1 + number) * 1e-4, eval_reward=0.1 + number)
    report_now(files.sweep)
    speeds, curves = figures["report.png"].axes
    assert (speeds.get_xlabel(), curves.get_ylabel()) == ("answer tokens per second, with sampling", "reward")
    assert {line.get_label(): line.get_ydata()[-1] for line in curves.lines} == {"0_a": 0.5, "1_b": 0.75}
    assert curves.get_yscale() == "linear"
    assert figures["sweep.png"].axes[1].get_ylabel() == "held-out reward"
