"""The table of a sweep, from nothing but files."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.config.metrics_log import MetricsLog
from components.launch.slurm.jobs import GONE, UNKNOWN
from components.launch.sweep.plan import Note, Point, Sweep, locked, write_note
from components.launch.sweep.point_rows import SweepRow, read_points, state_with_job
from components.launch.sweep.report import exit_status, report_now
from components.launch.sweep.table import print_table, read_report, to_csv, to_markdown
from tests.unit.full_disk import full_disk

GIB = 2**30
CONFIG = """
run: {dir: DIR, name: null, seed: 42}
parallelism: {strategy: STRATEGY}
training: {max_steps: 3, micro_batch_size: 2}
optimizer: {lr: LR}
"""


class Made:
    """A sweep in a folder, whose points ended as a test says."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        directory.mkdir()
        points = [Point(n, f"{n}_{name}", {"parallelism": name}, [], "tp=2", 2) for n, name in enumerate(names)]
        self.sweep = Sweep(
            directory, "id", "finetune", Path("/r.py"), Path("/"), "python r.py -m", [], ["parallelism"], points
        )
        self.sweep.write()

    def ended(
        self,
        number: int,
        *,
        note: Note | None = None,
        lr: float = 1e-4,
        job: str | None = None,
        **result: Any,
    ) -> None:
        """Let a point be started, and have this result.json, or none."""
        point = self.sweep.points[number]
        run_dir = self.sweep.run_dir(point)
        run_dir.mkdir()
        text = CONFIG.replace("DIR", str(run_dir)).replace("STRATEGY", point.name).replace("LR", str(lr))
        (run_dir / "config.yaml").write_text(text)
        if result:
            (run_dir / "result.json").write_text(json.dumps(result))
        if job:
            (run_dir / "job_id").write_text(f"{job}\n")
        write_note(self.sweep, point, note or Note(time.time(), 0, 4.0))

    def ok(self, number: int, speed: float, loss: float, **more: Any) -> None:
        """Let a point end well."""
        values: dict[str, Any] = {"wall_seconds": 3.0, "compute_dtype": "float32", "first_loss": 5.0}
        values |= {"mesh": "pp=1 x dp_shard=2 x tp=2", "processes": 4, "peak_memory_bytes": GIB}
        lr = more.pop("lr", 1e-4)
        values |= {"tokens_per_second": speed, "last_loss": loss, **more}
        self.ended(number, lr=lr, status="ok", **values)

    def rows(self) -> list[SweepRow]:
        """The rows in the order of the sweep."""
        return read_points(self.sweep)

    def told(self) -> str:
        """What is printed."""
        console = Console(width=200, record=True, quiet=False, file=io.StringIO())
        print_table(read_report(self.sweep), console)
        return console.export_text()


def test_the_fastest_comes_first_and_is_marked(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2", "tp2", "tp3"))
    made.ok(0, 1000.0, 4.0)
    made.ok(1, 2000.0, 4.0001)
    made.ended(2, note=Note(1.0, 1, 2.0), status="oom", error="rank 1: MemoryError: no more\nand more of it")
    report = read_report(made.sweep)
    assert [row.point.name for row in report.rows] == ["1_fsdp2", "0_ddp", "2_tp2", "3_tp3"]
    lines = [" ".join(line.split()) for line in made.told().splitlines()]
    assert lines[0] == "run parallelism mesh processes tokens/s per process peak GiB last loss wall s status"
    assert lines[1] == "1_fsdp2 fsdp2 dp_shard=2 x tp=2 4 2,000 500 1.00 4.0001 3.0 ok, best"
    assert lines[3] == "2_tp2 tp2 tp=2 2 2.0 oom"
    assert lines[4] == "3_tp3 tp3 tp=2 2 not started"
    assert lines[5] == "2_tp2: oom: rank 1: MemoryError: no more"
    assert lines[6].startswith("losses agree: 1_fsdp2, 0_ddp train one curve, at most 2.5e-05 apart (allowed: 1e-04")
    assert exit_status(report) == 1


def test_markdown_and_csv_say_the_same(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2"))
    made.ok(0, 1000.0, 4.0, mfu=0.4, peak_reserved_bytes=3 * GIB)
    made.ok(1, 900.25, 4.0)
    report = read_report(made.sweep)
    markdown = to_markdown(report).splitlines()
    header = (
        "| run | parallelism | mesh | processes | tokens/s | per process | MFU | peak GiB | reserved GiB | last loss |"
    )
    assert markdown[4].startswith(header)
    assert "| **0_ddp** |" in markdown[6]
    assert "| **40.0%** | **1.00** | **3.00** |" in markdown[6]
    assert "| 1.00 |  | 4.0000 |" in markdown[7]
    (first, second) = csv.DictReader(io.StringIO(to_csv(report)))
    assert (first["tokens_per_second"], first["mfu"], first["best"]) == ("1000.0", "0.4", "True")
    assert (second["tokens_per_second"], second["mfu"], second["best"]) == ("900.25", "", "False")
    assert [row["peak_reserved_gib"] for row in (first, second)] == ["3.0", ""]
    assert (second["parallelism"], second["peak_memory_gib"], second["status"]) == ("fsdp2", "1.0", "ok")
    assert exit_status(report) == 0


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "sweep", ("a",))
    made.ended(0, status="ok")
    assert report_now(made.sweep) == 0
    capsys.readouterr()
    with full_disk():
        assert report_now(made.sweep) == 1
    told = capsys.readouterr()
    assert f"{made.sweep.directory}/report.md: cannot be written: File too large; fix that, then run: " in told.err
    assert "0_a" in told.out
    assert "report: " not in told.out


def test_the_point_that_disagrees_is_flagged_although_it_is_the_first(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2", "tp2"))
    made.ok(0, 3000.0, 4.01)
    made.ok(1, 2000.0, 4.0)
    made.ok(2, 1000.0, 4.0)
    report = read_report(made.sweep)
    assert report.agreement.disagreeing == {0}
    told = made.told()
    assert "ok, LOSS DISAGREES" in told.splitlines()[1]
    assert "losses DISAGREE: last_loss of 0_ddp is 4.01, of 1_fsdp2 4.0: 2.5e-03 apart, more than 1e-04" in told
    assert "losses agree" not in told
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
def test_how_far_losses_may_differ(
    tmp_path: Path, dtype: str | None, other: float, agrees: bool, compared: str
) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2"))
    for number, loss in enumerate((4.0, other)):
        made.ok(number, 1000.0, **{"loss": 4.0, "compute_dtype": dtype, "last_loss": 4.0, compared: loss})
    assert (not read_report(made.sweep).agreement.disagreeing) == agrees


@pytest.mark.parametrize(
    ("steps", "early", "held_out", "disagreeing"),
    [
        (200, 4.0, 5.0, set()),  # the last losses are 1.2e-3 apart, as rounding was seen to make them in 200 steps
        (50, 4.0, 5.0, {0, 1}),
        (200, 4.001, 5.0, {0, 1}),
        (200, float("nan"), 5.0, {0, 1}),
        (200, 4.0, 5.001, {0, 1}),
    ],
)
def test_rounding_that_grew_is_no_wrong_mesh(
    tmp_path: Path, steps: int, early: float, held_out: float, disagreeing: set[int]
) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2"))
    for number, (loss, last, first) in enumerate(((4.0, 3.0, 5.0), (early, 3.0 * (1 + 1.2e-3), held_out))):
        made.ok(number, 1000.0, last, steps=steps, first_eval_loss=first, eval_loss=last)
        log = MetricsLog(made.sweep.run_dir(made.sweep.points[number]))
        for step, value in ((10, 4.5), (50, loss), (60, last)):
            log.append({"step": step, "loss": value, "tokens_per_second": 1.0})
    report = read_report(made.sweep)
    assert report.agreement.disagreeing <= disagreeing
    assert bool(report.agreement.disagreeing) == bool(disagreeing), report.agreement.notes


def test_only_points_of_one_curve_are_compared(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2", "tp2", "tp4"))
    made.ok(0, 1000.0, 4.0)
    made.ok(1, 1000.0, 3.0, lr=2e-4)
    assert "losses: not compared" in made.told()
    made.ok(2, 1000.0, 3.0, lr=2e-4)
    made.ok(3, 1000.0, 4.0)
    assert not read_report(made.sweep).agreement.disagreeing
    assert made.told().count("losses agree") == 2


@pytest.mark.parametrize(
    ("note", "result", "state", "reason"),
    [
        (Note(1.0, 2, 1.0, "training.max_steps=0: must be ..."), {}, "invalid", "training.max_steps=0"),
        (Note(1.0, 2, 1.0, "wrong"), {"status": "failed"}, "invalid", "wrong"),
        (Note(1.0, 2, 1.0, "mesh ...\n2 problems with this run:\na=1: x\nb=2: y"), {}, "invalid", "a=1: x; b=2: y"),
        (Note(1.0, 1, 1.0, "Traceback\nValueError: no"), {}, "failed", "ValueError: no"),
        (Note(1.0, 1, 1.0, "Traceback\nMemoryError: x"), {}, "oom", "MemoryError"),
        (Note(1.0, -9, 1.0, "", killed_for_memory=True), {}, "oom", "memory ran out"),
        (Note(1.0, -9, 1.0, "prompt: Why?", killed_for_memory=True), {}, "oom", "memory ran out"),
        (Note(1.0, -9, 1.0, ""), {}, "failed", "was ended by SIGKILL"),
        (Note(1.0, -9, 1.0, "step 7  loss 2.0718"), {}, "failed", "was ended by SIGKILL"),
        (Note(1.0, 3, 1.0, ""), {}, "failed", "exited with status 3 without output"),
        (Note(1.0, 130, 1.0, "interrupted"), {}, "interrupted", "interrupted"),
        (Note(1.0), {}, "interrupted", "the sweep ended while"),
        (Note(1.0), {"status": "ok"}, "ok", ""),
        (Note(1.0, 0, 1.0), {}, "ok", ""),
        (Note(1.0, 0, 1.0), {"status": "preempted"}, "preempted", ""),
        (Note(1.0, 1, 1.0), {"status": "failed", "error": "rank 0: x"}, "failed", "rank 0: x"),
        (Note(1.0, 75, 1.0), {"status": "hung", "error": "no progress for 9 s"}, "hung", "no progress for 9 s"),
        (Note(1.0, 0, 1.0), {"status": "what?"}, "failed", "what?"),
    ],
)
def test_the_state_of_a_local_point(
    tmp_path: Path, note: Note, result: dict[str, Any], state: str, reason: str
) -> None:
    made = Made(tmp_path / "s", ("ddp",))
    made.ended(0, note=note, **result)
    (row,) = made.rows()
    assert (row.state, reason in row.reason) == (state, True), row.reason


def test_a_point_that_runs_shows_how_far_it_is(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", ("ddp", "fsdp2"))
    made.ended(0, note=Note(time.time() + 60), status="failed")  # the result is of an earlier start
    metrics = made.sweep.run_dir(made.sweep.points[0]) / "metrics.jsonl"
    metrics.write_text('{"step": 7, "loss": 3.25, "tokens_per_second": 1234.5}\n{"step": 7, "eval_loss": 3}\n{"st')
    with locked(made.sweep.directory):
        running, waiting = made.rows()
        assert (running.state, running.reason) == ("running", "step 7, loss 3.2500, 1,234 tokens/s")
        assert waiting.state == "not started"
        assert exit_status(read_report(made.sweep)) == 0
    assert [row.state for row in made.rows()] == ["failed", "not started"]
    assert exit_status(read_report(made.sweep)) == 1


@pytest.mark.parametrize(
    ("result", "job", "state"),
    [
        (None, "submitted", "submitted"),
        (None, "running", "running"),
        (None, "ended", "failed"),
        (None, GONE, "failed"),
        (None, UNKNOWN, "submitted"),
        (None, "oom", "oom"),
        (None, "timeout", "timeout"),
        ("ok", "running", "ok"),
        ("preempted", "submitted", "submitted"),
        ("preempted", "running", "running"),
        ("preempted", "timeout", "timeout"),
        ("preempted", "cancelled", "cancelled"),
        ("preempted", "ended", "preempted"),
        ("preempted", UNKNOWN, "preempted"),
        ("failed", "submitted", "submitted"),
        ("failed", "oom", "oom"),
        ("failed", "failed", "failed"),
        ("oom", "failed", "oom"),
        ("hung", "failed", "hung"),
        ("cancelled", "cancelled", "cancelled"),
    ],
)
def test_a_result_and_the_state_of_its_job(result: str | None, job: str, state: str) -> None:
    assert state_with_job(result, job) == state


def test_jobs_that_nobody_can_be_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = Made(tmp_path / "s", ("ddp", "fsdp2", "tp2", "tp4"))
    made.ended(0, job="12")
    made.ended(1, job="13", status="ok", wall_seconds=8.0)
    made.ended(2, job="14", note=Note(1.0, 2, 1.0, "sbatch refuses it"))  # could not be submitted again
    made.ended(3, job="15", note=Note(1.0, 1, 1.0, "OSError: disk full"))
    rows = made.rows()
    assert [(row.state, row.seconds) for row in rows] == [
        ("submitted", None),
        ("ok", 8.0),
        ("invalid", None),
        ("failed", None),
    ]
    assert rows[0].reason == "job 12; Slurm cannot be queried from here"
    assert exit_status(read_report(made.sweep)) == 1
