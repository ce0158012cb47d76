"""Which checkpoints stay: the decision alone, on histories of saves; and when a save is due by time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from components import training
from components.checkpoint.manifest import Manifest
from components.checkpoint.retention import reasons_to_keep
from components.config.errors import ConfigError
from components.config.schema.checkpoint import CheckpointConfig


def saved(serial: int, step: int, loss: float | None = None, ephemeral: bool = False) -> Manifest:
    return Manifest(step, serial, {"world": 1}, {}, {}, eval_loss=loss, ephemeral=ephemeral)


def history(*told: str) -> list[Manifest]:
    """`40` is step 40, `40=2.5` with its evaluation loss, `40e` saved by time; the oldest first."""
    manifests = []
    for serial, text in enumerate(told, start=1):
        step, _, loss = text.partition("=")
        manifests.append(saved(serial, int(step.rstrip("e")), float(loss) if loss else None, step.endswith("e")))
    return manifests


def kept(manifests: list[Manifest], policy: CheckpointConfig) -> list[Manifest]:
    reasons = reasons_to_keep(manifests, policy)
    return [manifest for manifest, why in zip(manifests, reasons, strict=True) if why]


BEST = {"keep_best": True}
TABLE = [
    ("10 20 30 40", {}, [30, 40]),
    ("10 20 30 40", {"keep": 1}, [40]),
    ("10", {"keep": 5}, [10]),
    ("", {}, []),
    ("10 20 30 40 50", {"keep": 1, "every": 10, "keep_every": 20}, [20, 40, 50]),
    ("10=3 20=1 30=2 40=4", {"keep": 1, **BEST}, [20, 40]),
    ("10=3 20=1 30=2 40=4", {"keep": 1}, [40]),
    ("10=3 20=1 30=1 40=4", {"keep": 1, **BEST}, [20, 40]),  # of equal ones the earlier: the later is no better
    ("10=3 20 30=2 40", {"keep": 1, **BEST}, [30, 40]),  # what was not evaluated is never the best
    ("10 20 30", {"keep": 1, **BEST}, [30]),
    ("10=0 20=-1 30=2", {"keep": 1, **BEST}, [20, 30]),
    ("10 20 25e", {"keep": 1}, [20, 25]),  # the one by time takes nobody's place
    ("10 20 25e 30", {"keep": 2}, [20, 30]),
    ("10 15e 20 25e", {"keep": 2}, [10, 20, 25]),
    ("15e 17e", {}, [17]),
    ("15e=1 20=3 30=2", {"keep": 1, **BEST}, [30]),  # even with the lowest loss it goes
    ("20e 30", {"keep": 1, "every": 10, "keep_every": 20}, [30]),
    ("10 20 30 20 25", {"keep": 2}, [20, 25]),  # a run that went back: the order of saving decides, not the step
]


@pytest.mark.parametrize(("told", "policy", "steps"), TABLE)
def test_which_stay(told: str, policy: dict[str, int], steps: list[int]) -> None:
    manifests = history(*told.split())
    assert [manifest.step for manifest in kept(manifests, CheckpointConfig(**policy))] == steps
    shuffled = random.Random(0).sample(manifests, len(manifests))  # the order in which a folder lists them is nothing
    assert sorted(m.serial for m in kept(shuffled, CheckpointConfig(**policy))) == [
        m.serial for m in kept(manifests, CheckpointConfig(**policy))
    ]


def test_each_stays_for_a_reason_that_is_told() -> None:
    policy = CheckpointConfig(keep=1, every=10, keep_every=20, keep_best=True)
    told = reasons_to_keep(history("10=1", "20=3", "30=3", "40=2", "45e"), policy)
    assert told == [["best"], ["every 20"], [], ["last 1", "every 20"], ["newest"]]


def test_pruning_after_every_save_loses_nothing_that_the_whole_history_would_keep() -> None:
    """Random histories, pruned as a run does it, against what was promised of everything that was ever saved."""
    dice = random.Random(0)
    for _ in range(500):
        policy = CheckpointConfig(
            keep=dice.randint(1, 3), every=1, keep_every=dice.choice([0, 2, 5]), keep_best=dice.random() < 0.5
        )
        there: list[Manifest] = []
        ever: list[Manifest] = []
        for serial in range(1, dice.randint(1, 25)):
            loss = dice.choice([None, dice.randint(0, 9) / 2])
            ever.append(saved(serial, dice.randint(1, 30), loss, dice.random() < 0.3))
            there = kept([*there, ever[-1]], policy)
            lasting = [manifest for manifest in ever if not manifest.ephemeral]
            losses = [manifest.eval_loss for manifest in lasting if manifest.eval_loss is not None]
            promised = {serial, *(manifest.serial for manifest in lasting[-policy.keep :])}
            if policy.keep_every:
                promised |= {manifest.serial for manifest in lasting if manifest.step % policy.keep_every == 0}
            if policy.keep_best and losses:
                promised.add(next(m.serial for m in lasting if m.eval_loss == min(losses)))
            assert {manifest.serial for manifest in there} == promised
            assert sum(manifest.ephemeral for manifest in there) <= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 10, "keep_every": 15}, "checkpoint.keep_every=15: must be a multiple of checkpoint.every=10"),
        ({"keep_every": 15}, "checkpoint.keep_every=15: must be a multiple of checkpoint.every=0"),
        ({"every": 10, "keep_every": -10}, "checkpoint.keep_every=-10: must be at least 0"),
        ({"every_minutes": -1}, "checkpoint.every_minutes=-1: must be at least 0"),
    ],
)
def test_what_cannot_be_kept_is_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**values)
    assert replace(CheckpointConfig(every=10), keep_every=20).keep_every == 20


def test_a_save_is_due_once_the_minutes_have_passed_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock, never = training.SaveClock(2.5), training.SaveClock(0)
    seen = []
    for now[0] in (100.0, 249.9, 250.0, 400.0):
        seen.append(clock.due())
        assert never.due() == 0
    assert seen == [0, 0, 1, 1]
    clock.restart()
    assert clock.due() == 0
    now[0] = 550.0
    assert clock.due() == 1
