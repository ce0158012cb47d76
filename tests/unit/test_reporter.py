"""What the reporter prints and writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from components.config.schema.logging import LoggingConfig
from components.observability import Reporter, Result, peak_memory_bytes, peak_reserved_bytes
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


def test_result_with_task_scores_that_are_not_numbers_is_written(tmp_path: Path) -> None:
    tasks = {"a/acc": math.nan, "b": 0.5}
    result = Result(status="ok", steps=1, mesh="1", processes=1, wall_seconds=2.0, peak_memory_bytes=1, tasks=tasks)
    Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True).finish(result)
    assert read_json(tmp_path / "result.json")["tasks"] == {"a/acc": None, "b": 0.5, "nonfinite": {"a/acc": "nan"}}


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
