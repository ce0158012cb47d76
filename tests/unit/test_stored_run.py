"""metrics.jsonl is strict JSON; damaged lines are reported, preserved and skipped, never dropped silently."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from components.config.schema.run import LoggingConfig
from components.observability import Reporter
from components.training import StepMetrics

STEPS = 8


def step(number: int, loss: float | None = None) -> StepMetrics:
    return StepMetrics(number, number / 10 if loss is None else loss, 1.0, 64, 1.0, False, False, False, False)


def reporter(run: Path) -> Reporter:
    return Reporter(LoggingConfig(plot=False), str(run), enabled=True)


def write(run: Path) -> Path:
    report = reporter(run)
    for number in range(1, STEPS + 1):
        report.step(step(number), lr=1e-3, tokens=64 * number)
    return run / "metrics.jsonl"


def steps(report: Reporter) -> list[int]:
    return [line["step"] for line in report.read()]


def strict(path: Path) -> list[dict[str, object]]:
    def reject(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def test_nan_is_written_as_null_and_listed_in_nonfinite(tmp_path: Path) -> None:
    report = reporter(tmp_path)
    report.step(step(1, math.nan), lr=1e-3, tokens=64)
    report.evaluation(step=1, eval_loss=-math.inf, count=3)
    first, second = strict(tmp_path / "metrics.jsonl")
    assert (first["loss"], first["nonfinite"], first["grad_norm"]) == (None, {"loss": "nan"}, 1.0)
    assert (second["eval_loss"], second["nonfinite"]) == (None, {"eval_loss": "-inf"})
    again = report.read()
    assert math.isnan(again[0]["loss"])
    assert again[1]["eval_loss"] == -math.inf


def set_line(number: int, content: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[: number - 1], content, *lines[number:]]


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[int], str]] = {
    "bad JSON": (set_line(3, b'{"step": 3, "lo'), [3], "holds a damaged line"),
    "missing step": (set_line(3, b'{"loss": 3}'), [3], "holds a damaged line"),
    "not an object": (set_line(3, b"[3]"), [3], "holds a damaged line"),
    "not UTF-8": (set_line(3, b'{"step": 3, "x": "\xff\xfe"}'), [3], "holds a damaged line"),
    "changed value": (lambda lines: [line.replace(b'"loss": 0.3', b'"loss": 0.7') for line in lines], [3], "damaged"),
    "missing newline": (lambda lines: [lines[0], lines[1] + lines[2], *lines[3:]], [], ""),
    "wrong newline": (lambda lines: [lines[0], lines[1] + b"\x0b" + lines[2], *lines[3:]], [], ""),
    "missing lines": (
        lambda lines: [*lines[:2], *lines[4:]],
        [3, 4],
        "2 lines are missing in metrics.jsonl before step 5",
    ),
    "truncated": (lambda lines: lines[:6], [7, 8], "ends with step 6: the history of the steps up to 8 is lost"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_and_preserved_and_the_run_continues(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    damage, lost, message = DAMAGE[kind]
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in damage(lines)))
    report = reporter(tmp_path)
    capsys.readouterr()
    report.continue_from(STEPS)
    assert message in capsys.readouterr().out
    assert steps(report) == [number for number in range(1, STEPS + 1) if number not in lost]
    report.step(step(STEPS + 1), lr=1e-3, tokens=64)
    assert strict(path)[-1]["step"] == STEPS + 1
    preserved = tmp_path / "metrics.jsonl.damaged"
    assert preserved.exists() == ("damaged" in message)
    if preserved.exists():
        assert preserved.read_bytes() in path.read_bytes() + b"".join(line + b"\n" for line in damage(lines))
    again = reporter(tmp_path)
    again.continue_from(STEPS + 1)
    assert "metrics.jsonl" not in capsys.readouterr().out, "repaired damage must not be reported again"


def test_lines_without_checksums_are_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    report = reporter(tmp_path)
    report.continue_from(2)
    assert "metrics.jsonl holds 2 damaged lines: moved to metrics.jsonl.damaged" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == lines
    report.step(step(3), lr=1e-3, tokens=64)
    assert steps(report) == [3]
    strict(tmp_path / "metrics.jsonl")


def test_dropped_steps_that_the_run_repeats_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    report = reporter(tmp_path)
    report.continue_from(5)
    assert "steps 6 to 8 in metrics.jsonl are dropped: the run repeats them" in capsys.readouterr().out
    assert steps(report) == [1, 2, 3, 4, 5]


def test_missing_history_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = reporter(tmp_path)
    report.continue_from(5)  # started from another run's checkpoint, so there is no history yet
    assert capsys.readouterr().out == ""
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    report.continue_from(5)
    assert "metrics.jsonl is missing or empty: the history of steps 1 to 5 is lost" in capsys.readouterr().out


def test_no_bit_flip_changes_the_history_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    original, before = path.read_bytes(), reporter(tmp_path).read()
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        report = reporter(tmp_path)
        capsys.readouterr()
        report.continue_from(STEPS)
        after = report.read()
        assert all(line in before for line in after)
        assert after == before or "metrics.jsonl" in capsys.readouterr().out
