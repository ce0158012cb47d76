"""The reader of the output may leave (`| head`, a `tee` that Ctrl-C ends too); the run and its numbers do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from components.config.schema.logging import LoggingConfig
from components.observability import Reporter, Result, peak_memory_bytes, peak_reserved_bytes
from components.observability.result import summary


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_reader_that_leaves_does_not_end_the_run(
    both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipes = [os.pipe() for _ in range(1 + both)]
    for reader, _ in pipes:
        os.close(reader)
    streams = [os.fdopen(writer, "w") for _, writer in pipes]
    monkeypatch.setattr(sys, "stdout", streams[0])
    if both:
        monkeypatch.setattr(sys, "stderr", streams[1])
    report = Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True)
    for step in (0, 1):
        report.say("a line that nobody reads")
        report.evaluation(step=step, eval_loss=2.0, count=3)
    for stream in streams:
        print("nor this one", file=stream, flush=True)
        stream.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    if not both:
        assert capsys.readouterr().err.count("the output pipe is closed; the run continues") == 1


def test_peak_memory_is_reported_as_allocated_and_reserved_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs out is what torch's allocator has reserved."""
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    values = {"status": "ok", "steps": 1, "mesh": "1", "processes": 1, "wall_seconds": 2.0}
    told = {}
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        peaks = {"peak_memory_bytes": peak_memory_bytes(device), "peak_reserved_bytes": peak_reserved_bytes(device)}
        told[kind] = summary(Result(**values, **peaks), Path("run"))
    assert "peak memory " in told["cpu"]
    assert "reserved" not in told["cpu"]
    assert "peak memory 1.00 GiB allocated, 3.00 GiB reserved\n" in told["cuda"]
