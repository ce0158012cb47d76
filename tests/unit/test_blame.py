"""Which rank a run that stands still waits for, by what the ranks posted; and when skipped updates end a run."""

from __future__ import annotations

import pytest

from components.config.schema.training import TrainingConfig
from components.resilience.heartbeat import FIRST_BEAT_SECONDS, MAX_NAMED_RANKS, BeatTracker, Post, blame, late_ranks
from components.resilience.watchdog import _SuspensionDetector
from components.training import NonFiniteGradients, StepMetrics, TrainState


def post(beat: int = 1, phase: str = "in step 4", *, finished: bool = False, **collectives: int) -> Post:
    return Post(beat, phase, "forward (model.py:7)", "n2", collectives, finished)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every clock shows, to be set."""
    shown = [100.0]
    monkeypatch.setattr("components.resilience.heartbeat.time.monotonic", lambda: shown[0])
    return shown


def test_who_is_not_heard_to_beat_for_long_enough_is_silent(now: list[float]) -> None:
    tracker = BeatTracker()
    assert tracker.seconds_tracked < 0
    first = {0: post(3), 1: post(3), 2: post(3)}
    tracker.update(first, 3)
    now[0] += 4.0
    second = {0: post(9), 1: post(3), 2: post(3, finished=True)}
    tracker.update(second, 3)
    assert tracker.seconds_tracked == 4.0
    assert tracker.silent(4.0, second) == [1]
    assert tracker.silent(4.5, second) == []
    now[0] += 4.0
    assert tracker.silent(4.0, second) == [0, 1]
    tracker.update({0: post(9), 1: post(4), 2: post(3, finished=True)}, 3)
    assert tracker.silent(4.0, second) == [0]


def test_who_never_beat_has_time_to_come(now: list[float]) -> None:
    tracker = BeatTracker()
    tracker.update({0: post(3)}, 2)
    now[0] += FIRST_BEAT_SECONDS - 1
    tracker.update({0: post(5)}, 2)
    assert tracker.silent(4.0, {0: post(5)}) == []
    now[0] += 1.0
    tracker.update({0: post(6)}, 2)
    assert tracker.silent(4.0, {0: post(6)}) == [1]


def test_who_has_begun_fewer_collectives_of_a_group_is_late() -> None:
    assert late_ranks({0: post(world=7), 1: post(world=6), 2: post(world=7)}) == [1]
    assert late_ranks({0: post(world=7), 1: post(world=7)}) == []
    # Groups that a rank is no member of say nothing of it.
    assert late_ranks({0: post(world=7, a=9), 1: post(world=7, a=9), 2: post(world=7, b=2)}) == []


def test_who_waits_for_another_one_is_not_blamed() -> None:
    """Rank 3 keeps rank 2 waiting in group b, so rank 2 does not come to group a, where rank 0 waits."""
    posts = {0: post(a=5, c=1), 1: post(c=1), 2: post(a=4, b=8), 3: post(b=7)}
    assert late_ranks(posts) == [3]
    # In a circle everyone waits for somebody: then all who are late are named.
    assert late_ranks({0: post(a=5, b=7), 1: post(a=4, b=8)}) == [0, 1]


def test_silence_comes_before_lateness_and_both_before_where_everybody_is() -> None:
    late = {0: post(world=7), 1: post(phase="in step 3", world=6)}
    assert blame([1], late) == "rank 1 on host n2 is missing (last seen in step 3)"
    assert blame([1], {0: post(world=7)}) == "rank 1 is missing (never seen)"
    assert blame([], late) == (
        "rank 1 on host n2 has not joined a collective that others wait in: it is in step 3, at forward (model.py:7)"
    )
    told = blame([], {0: post(world=7), 1: post(world=7)})
    common = "every rank posts heartbeats and none is behind the others"
    assert told.startswith(f"{common}: rank 0 on host n2 is in step 4, at forward")
    assert "rank 1 on host n2 is in step 4" in told


def test_a_message_names_only_so_many() -> None:
    told = blame(list(range(3 * MAX_NAMED_RANKS)), {})
    assert told.count("never seen") == MAX_NAMED_RANKS
    assert told.endswith(f"; and {2 * MAX_NAMED_RANKS} ranks more")


def test_time_in_which_nothing_ran_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("components.resilience.watchdog.time.monotonic", lambda: now[0])
    clock = _SuspensionDetector(threshold=2.0)
    slept = []
    for later in (1.0, 1.5, 60.0, 1.0):
        now[0] += later
        slept.append(clock.slept())
    assert slept == [0.0, 0.0, 60.0, 0.0]


def metrics(step: int, *, skipped: bool) -> StepMetrics:
    return StepMetrics(step, 1.0, 1.0, 10, 0.1, skipped, preempt=False, interrupt=False, must_save=False)


def first_refused(state: TrainState, policy: TrainingConfig, skips: str) -> int | None:
    """The step at which a state gives up, of steps of which x is skipped."""
    for step, letter in enumerate(skips, start=state.step + 1):
        state.step = step
        state.record(metrics(step, skipped=letter == "x"))
        try:
            state.raise_if_diverged(metrics(step, skipped=letter == "x"), policy)
        except NonFiniteGradients:
            return step
    return None


@pytest.mark.parametrize(
    ("stop_after", "skips", "refused"),
    [(3, "xx.xx.xxx.", 9), (3, "xx.xx.xx.", None), (1, "..x", 3), (0, "xxxxxxxxxxxxxxxxxxxx", None)],
)
def test_only_skips_in_a_row_end_a_run(stop_after: int, skips: str, refused: int | None) -> None:
    assert first_refused(TrainState(), TrainingConfig(stop_after_skipped=stop_after), skips) == refused


def test_a_resumed_run_counts_on() -> None:
    policy, state = TrainingConfig(stop_after_skipped=3), TrainState()
    assert first_refused(state, policy, ".xx") is None
    assert first_refused(TrainState.from_dict(state.to_dict()), policy, "xxx") == 4
    # A checkpoint of before the count was kept.
    old = {name: value for name, value in state.to_dict().items() if name != "skipped_in_a_row"}
    assert first_refused(TrainState.from_dict(old), policy, "xxx") == 6
