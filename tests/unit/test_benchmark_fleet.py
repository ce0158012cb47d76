"""scripts/benchmark/fleet.py: goodput against a run that is played event by event."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmark.fleet import Times, best_interval, goodput, simulated_goodput

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark" / "fleet.py"
RUNS = [Times(3600, 10, 60, 300), Times(600, 30, 0, 100), Times(86_400, 0.5, 20, 600)]


def played(interval: float, times: Times, failures: int) -> float:
    """Play a run: train, save, train on while the checkpoint is completed, fail, restart from the last complete one."""
    rng = random.Random(1)
    kept = total = 0.0
    for _ in range(failures):
        failure, clock = rng.expovariate(1 / times.failures), times.restart
        while clock + interval + times.blocked + times.background <= failure:
            clock += interval + times.blocked
            kept += interval
        total += failure
    return kept / total


@pytest.mark.parametrize("times", RUNS)
@pytest.mark.parametrize("interval", [60.0, 600.0])
def test_goodput_is_that_of_a_run_played_event_by_event(times: Times, interval: float) -> None:
    expected = goodput(interval, times)
    assert played(interval, times, 20_000) == pytest.approx(expected, rel=0.03)
    assert simulated_goodput(interval, times, 100_000, seed=0) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("times", RUNS)
def test_no_other_interval_is_better_than_the_best(times: Times) -> None:
    best = best_interval(times)
    assert best == pytest.approx((2 * times.blocked * times.failures) ** 0.5, rel=0.25)  # Young's first-order formula
    assert all(goodput(best, times) >= goodput(best * factor, times) for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 10))


def test_frequent_failures_do_not_overflow() -> None:
    assert goodput(1e6, Times(1, 1e6, 0, 0)) == 0
    assert best_interval(Times(1, 1e6, 0, 0)) == pytest.approx(1)


def test_table_has_a_row_per_world() -> None:
    command = [sys.executable, str(SCRIPT), "goodput", "--worlds", "8", "16384", "--failures", "1000"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(" | ")[0] for line in printed[2:]] == ["| 8", "| 16,384"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["goodput", "--mtbf-hours", "0"], "--mtbf-hours: 0: must be a number above 0"),
        (["goodput", "--blocked-seconds", "soon"], "--blocked-seconds: soon: must be a number of at least 0"),
        (["costs", "--worlds", "100"], "--worlds: 100: must be a power of two of at least 4"),
    ],
)
def test_invalid_options_are_rejected_with_the_rule(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: argument {message}" in done.stderr
