"""What the reporter prints and writes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from components.config.schema.run import LoggingConfig
from components.observability import Reporter, Result, peak_memory_bytes, peak_reserved_bytes, render_model_card
from components.observability.result import summary
from components.protocol.run_files import read_json
from components.training import StepMetrics


def test_skipped_update_is_printed_at_steps_that_are_not_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True)
    for step in range(1, 5):
        skipped = step in (3, 4)
        values = {"loss": 1.0, "grad_norm": 1.0, "tokens": 10, "seconds": 1.0, "preempt": False, "interrupt": False}
        report.step(StepMetrics(step=step, skipped=skipped, must_save=False, **values), lr=1.0, tokens=10, every=4)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed if "update skipped" in line] == ["3", "4"]


DPO = {"margin": -0.0004725, "accuracy": 0.75, "reward_chosen": -0.00038, "reward_rejected": -0.00086}


@pytest.mark.parametrize(
    ("others", "shown"), [({}, ["grad_norm", "lr"]), (DPO, ["margin", "accuracy"]), ({"divergence": 4.4e-05}, [])]
)
def test_lines_of_metrics_fit_80_columns(
    others: dict[str, float],
    shown: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not fit is in metrics.jsonl only, and the same in every line; small losses keep their digits."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report = Reporter(LoggingConfig(plot=False, progress=False), str(tmp_path), enabled=True, total_steps=2)
    values = {"grad_norm": 13.83, "seconds": 1.0, "preempt": False, "interrupt": False, "must_save": False}
    for step, loss in ((1, 0.0003318), (2, 0.0003017)):
        metrics = StepMetrics(step=step, skipped=False, tokens=2541, loss=loss, others=others, **values)
        report.step(metrics, lr=2e-7, tokens=2541)
    report.evaluation(step=2, eval_loss=4.409e-05, count=127, unit="pair", metrics=others)
    report.print("word " * 30 + "/a/path/" + "x" * 90)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == ["/a/path/" + "x" * 90]
    assert [line.split()[2:4] for line in lines[:3]] == [
        ["loss", "0.0003318"], ["loss", "0.0003017"], ["eval_loss", "4.409e-05"]
    ]  # fmt: skip
    first, second = (line.split()[0::2] for line in lines[:2])
    assert first == second
    assert {"tokens/s", *shown} <= set(first), first
    assert ("over 127 held-out pairs" in lines[2]) == ("divergence" not in others)
    assert report.read()[-1].items() >= {f"eval_{name}": value for name, value in others.items()}.items()


def test_result_with_task_scores_that_are_not_numbers_is_written(tmp_path: Path) -> None:
    tasks = {"a/acc": math.nan, "b": 0.5}
    result = Result(status="ok", steps=1, mesh="1", processes=1, wall_seconds=2.0, peak_memory_bytes=1, tasks=tasks)
    Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True).finish(result)
    assert read_json(tmp_path / "result.json")["tasks"] == {"a/acc": None, "b": 0.5, "nonfinite": {"a/acc": "nan"}}


@pytest.mark.parametrize(("processes", "is_kept"), [(8, True), (4, False)])
def test_estimates_of_the_launcher_are_those_of_the_same_number_of_processes(
    processes: int, is_kept: bool, tmp_path: Path
) -> None:
    planned = {"gpu": "h100_80", "processes": 8, "step_seconds": 0.5}
    (tmp_path / "environment.json").write_text(json.dumps({"planned": planned}))
    result = Result(status="ok", steps=1, mesh="1", processes=processes, wall_seconds=2.0, peak_memory_bytes=1)
    Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True).finish(result)
    assert read_json(tmp_path / "result.json")["planned"] == (planned if is_kept else None)


def test_peak_memory_is_reported_as_allocated_and_reserved_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved memory is what runs out: torch's caching allocator holds more than is allocated."""
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    values = {"status": "ok", "steps": 1, "mesh": "1", "processes": 1, "wall_seconds": 2.0}
    summaries = {}
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        peaks = {"peak_memory_bytes": peak_memory_bytes(device), "peak_reserved_bytes": peak_reserved_bytes(device)}
        summaries[kind] = summary(Result(**values, **peaks), Path("run"))
    assert "peak memory " in summaries["cpu"]
    assert "reserved" not in summaries["cpu"]
    assert "peak memory 1.00 GiB allocated, 3.00 GiB reserved\n" in summaries["cuda"]


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (
            "teacher: {path: big, revision: v1, stored: null}\ndata: {kind: sft}\n"
            "objective: {kind: distillation, temperature: 2.0, cross_entropy_weight: 0.0}\n",
            ["teacher | big at revision v1", "objective | distillation, temperature 2.0", "target tokens | 90",
             "loss | 0.0003318 in the first step, 12.5000 in the last", "batch | 4 sequences per step, up to 8 tokens"],
        ),
        ("teacher: {path: null, stored: run}\n", ["teacher | its most likely tokens, stored in run"]),
        (
            "objective: {kind: reward, center_weight: 0.0}\ndata: {kind: preferences, chosen_column: null}\n",
            ["objective | reward", "input tokens | 90", "batch | 4 pairs per step, up to 8 tokens per answer"],
        ),
        ("objective: {kind: kto}\ndata: {chosen_column: null}\n", ["batch | 4 answers per step, up to 8"]),
    ],
)  # fmt: skip
def test_model_card_names_teacher_objective_and_units(config: str, rows: list[str], tmp_path: Path) -> None:
    sizes = "training: {global_batch_size: 4, seq_len: 8}\n"
    (tmp_path / "config.yaml").write_text(config + sizes)
    state = {"step": 3, "tokens": 90, "first_loss": 0.0003318, "last_loss": 12.5}
    card = render_model_card(tmp_path, state, "1")
    assert [row for row in rows if f"| {row}" not in card] == []


def test_summary_names_what_was_done_and_counted() -> None:
    values = {"status": "ok", "mesh": "1", "processes": 1, "wall_seconds": 2.0, "peak_memory_bytes": 1}
    evaluated = summary(Result(steps=12, eval_loss=1.5, **values), Path("run"))
    assert evaluated.startswith("ok: evaluated step 12 on 1 process in 2 s\n")
    hub = summary(Result(steps=0, eval_loss=1.5, **values), Path("run"))
    assert hub.startswith("ok: evaluated on 1 process in 2 s\n")
    assert summary(Result(steps=0, **values), Path("run")).startswith("ok: 1 process in 2 s\n")
    losses = {"first_loss": 0.0003318, "last_loss": 5.0668e-05, "tokens_per_second": 900.0, "counted_tokens": "input"}
    trained = summary(Result(steps=3, **losses, **values), Path("run"))
    assert trained.startswith("ok: 3 steps on 1 process in 2 s\n  loss 0.000332 to 5.07e-05\n")
    assert "  900 input tokens/s\n" in trained
