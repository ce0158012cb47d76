"""Work lost by restarts, from the files of a run's attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.observability import result as lost_work_module
from components.observability.result import LostWork, lost_work, record_first_step, record_start


@pytest.mark.parametrize(
    ("starts", "lost"),
    [
        # time of the start and of the first step, lost steps, and when the checkpoint was saved
        ([(100, 105, 0, None), (130, 140, 7, 120.0), (150, 158, 3, 120.0), (210, 214, 1, 200.0)],
         LostWork(restarts=3, steps=11, seconds=(158 - 120) + (214 - 200))),
        ([(100, 120, 0, None), (120, 140, 5, None)], LostWork(restarts=1, steps=5, seconds=40.0)),
        ([(100, 105, 0, None)], LostWork()),
    ],
    ids=["from the same checkpoint", "without a checkpoint", "no restart"],
)  # fmt: skip
def test_restarts_count_the_time_since_their_checkpoint_once(
    starts: list[tuple[int, int, int, float | None]], lost: LostWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(lost_work_module.time, "time", lambda: now)
    for attempt, (began, first_step, lost_steps, saved) in enumerate(starts):
        (tmp_path / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        now = began
        record_start(tmp_path, attempt, lost_steps, saved)
        now = first_step
        record_first_step(tmp_path, attempt)
    assert lost_work(tmp_path) == lost
