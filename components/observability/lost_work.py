"""Work that a run lost by restarts: steps taken again, and the time until training went on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from components.protocol.run_files import (
    LOGS,
    atomic_write_json,
    attempt_logs,
    disk_errors_named,
    numbers_in,
    read_json,
)

PROGRESS = "progress.json"
"""File in the logs of an attempt: when it began and took its first step, and what it takes again."""


@dataclass(frozen=True, slots=True)
class LostWork:
    """Work lost over all attempts of a run."""

    restarts: int = 0
    """Number of attempts after the first."""
    steps: int = 0
    """Steps taken again, as far as earlier attempts had logged them."""
    seconds: float = 0.0
    """Seconds from each checkpoint that an attempt resumed from, or from the start of the run, until an attempt had
    taken a step from there: the steps taken again, the end of the earlier attempt, the queue and the start."""


def record_start(run_dir: Path, attempt: int, lost_steps: int, saved: float | None) -> None:
    """Record the start of an attempt in its logs.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt.
        lost_steps: Steps that the attempt takes again.
        saved: Seconds since the epoch at which its checkpoint was saved; None if it begins with the first step.
    """
    now = time.time()
    since = saved or read_json(attempt_logs(run_dir, 0) / PROGRESS).get("since", now)
    _write(run_dir, attempt, {"since": since, "lost_steps": lost_steps})


def record_first_step(run_dir: Path, attempt: int) -> None:
    """Record that an attempt has taken its first step."""
    _write(run_dir, attempt, {"first_step": time.time()})


def lost_work(run_dir: Path) -> LostWork:
    """Return the work lost by the restarts of a run so far."""
    attempts = sorted(numbers_in(run_dir / LOGS, "attempt_"))
    files = [attempt_logs(run_dir, number) / PROGRESS for number in attempts if number]
    restarts = [read_json(file) for file in files if file.is_file()]
    # A later attempt from the same checkpoint includes the time of an earlier one.
    seconds = {each["since"]: each["first_step"] - each["since"] for each in restarts if "first_step" in each}
    steps = sum(each.get("lost_steps", 0) for each in restarts)
    return LostWork(len(restarts), steps, round(sum(seconds.values()), 1))


def _write(run_dir: Path, attempt: int, values: dict[str, float]) -> None:
    logs = attempt_logs(run_dir, attempt)
    if logs.is_dir():
        with disk_errors_named(logs / PROGRESS):
            atomic_write_json(logs / PROGRESS, {**read_json(logs / PROGRESS), **values})
