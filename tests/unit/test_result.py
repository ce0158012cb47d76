"""Work lost by restarts, from the files of a run's attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.observability import result as lost_work_module
from components.observability.result import LostWork, lost_work, record_first_step, record_start


def test_restarts_from_the_same_checkpoint_count_their_time_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 0 saves at 120 s and ends; attempts 1 and 2 resume from there, attempt 3 from a checkpoint of 200 s."""
    now = 100.0
    monkeypatch.setattr(lost_work_module.time, "time", lambda: now)
    starts = [(100, 105, 0, None), (130, 140, 7, 120.0), (150, 158, 3, 120.0), (210, 214, 1, 200.0)]
    for attempt, (began, first_step, lost_steps, saved) in enumerate(starts):
        (tmp_path / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        now = began
        record_start(tmp_path, attempt, lost_steps, saved)
        now = first_step
        record_first_step(tmp_path, attempt)
    assert lost_work(tmp_path) == LostWork(restarts=3, steps=11, seconds=(158 - 120) + (214 - 200))


def test_run_that_restarts_without_a_checkpoint_lost_all_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(lost_work_module.time, "time", lambda: now)
    for attempt in (0, 1):
        (tmp_path / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        record_start(tmp_path, attempt, 5 * attempt, None)
        now += 20
        record_first_step(tmp_path, attempt)
    assert lost_work(tmp_path) == LostWork(restarts=1, steps=5, seconds=40.0)


def test_run_without_restarts_has_lost_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt_0").mkdir(parents=True)
    record_start(tmp_path, 0, 0, None)
    record_first_step(tmp_path, 0)
    assert lost_work(tmp_path) == LostWork()
