"""The retention policy, as a function of the history of saves, and the timing of saves by minutes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from components import training
from components.checkpoint.manifest import Manifest, reasons_to_keep
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError


def manifest_of(serial: int, step: int, loss: float | None = None, ephemeral: bool = False) -> Manifest:
    return Manifest(step, serial, {"world": 1}, {}, {}, eval_loss=loss, ephemeral=ephemeral)


def history(*saves: str) -> list[Manifest]:
    """Parse saves, oldest first: `40` is step 40, `40=2.5` has an eval loss, `40e` is ephemeral (saved by time)."""
    manifests = []
    for serial, text in enumerate(saves, start=1):
        step, _, loss = text.partition("=")
        manifests.append(manifest_of(serial, int(step.rstrip("e")), float(loss) if loss else None, step.endswith("e")))
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
    ("10=3 20=1 30=1 40=4", {"keep": 1, **BEST}, [20, 40]),  # on a tie the earlier checkpoint is the best one
    ("10=3 20 30=2 40", {"keep": 1, **BEST}, [30, 40]),  # a checkpoint without an evaluation is never the best
    ("10 20 30", {"keep": 1, **BEST}, [30]),
    ("10=0 20=-1 30=2", {"keep": 1, **BEST}, [20, 30]),
    ("10 20 25e", {"keep": 1}, [20, 25]),  # an ephemeral checkpoint does not count toward keep
    ("10 20 25e 30", {"keep": 2}, [20, 30]),
    ("10 15e 20 25e", {"keep": 2}, [10, 20, 25]),
    ("15e 17e", {}, [17]),
    ("15e=1 20=3 30=2", {"keep": 1, **BEST}, [30]),  # an ephemeral checkpoint is never kept as the best
    ("20e 30", {"keep": 1, "every": 10, "keep_every": 20}, [30]),
    ("10 20 30 20 25", {"keep": 2}, [20, 25]),  # a run resumed from an earlier step: sorted by serial, not by step
]


@pytest.mark.parametrize(("saves", "policy", "steps"), TABLE)
def test_policy_keeps_the_expected_steps(saves: str, policy: dict[str, int], steps: list[int]) -> None:
    manifests = history(*saves.split())
    assert [manifest.step for manifest in kept(manifests, CheckpointConfig(**policy))] == steps
    shuffled = random.Random(0).sample(manifests, len(manifests))  # as an unordered directory listing
    assert sorted(m.serial for m in kept(shuffled, CheckpointConfig(**policy))) == [
        m.serial for m in kept(manifests, CheckpointConfig(**policy))
    ]


def test_reasons_to_keep_are_reported() -> None:
    policy = CheckpointConfig(keep=1, every=10, keep_every=20, keep_best=True)
    reasons = reasons_to_keep(history("10=1", "20=3", "30=3", "40=2", "45e"), policy)
    assert reasons == [["best"], ["every 20"], [], ["last 1", "every 20"], ["newest"]]


def test_pruning_after_every_save_equals_the_policy_on_the_full_history() -> None:
    """Random histories, pruned after every save as in a run, against the policy applied to all saves at once."""
    rng = random.Random(0)
    for _ in range(500):
        policy = CheckpointConfig(
            keep=rng.randint(1, 3), every=1, keep_every=rng.choice([0, 2, 5]), keep_best=rng.random() < 0.5
        )
        remaining: list[Manifest] = []
        all_saves: list[Manifest] = []
        for serial in range(1, rng.randint(1, 25)):
            loss = rng.choice([None, rng.randint(0, 9) / 2])
            all_saves.append(manifest_of(serial, rng.randint(1, 30), loss, rng.random() < 0.3))
            remaining = kept([*remaining, all_saves[-1]], policy)
            permanent = [manifest for manifest in all_saves if not manifest.ephemeral]
            losses = [manifest.eval_loss for manifest in permanent if manifest.eval_loss is not None]
            expected = {serial, *(manifest.serial for manifest in permanent[-policy.keep :])}
            if policy.keep_every:
                expected |= {manifest.serial for manifest in permanent if manifest.step % policy.keep_every == 0}
            if policy.keep_best and losses:
                expected.add(next(m.serial for m in permanent if m.eval_loss == min(losses)))
            assert {manifest.serial for manifest in remaining} == expected
            assert sum(manifest.ephemeral for manifest in remaining) <= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 10, "keep_every": 15}, "checkpoint.keep_every=15: must be a multiple of checkpoint.every=10"),
        ({"keep_every": 15}, "checkpoint.keep_every=15: must be a multiple of checkpoint.every=0"),
        ({"every": 10, "keep_every": -10}, "checkpoint.keep_every=-10: must be at least 0"),
        ({"every_minutes": -1}, "checkpoint.every_minutes=-1: must be at least 0"),
    ],
)
def test_invalid_retention_policy_is_rejected(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**values)
    assert replace(CheckpointConfig(every=10), keep_every=20).keep_every == 20


def test_save_is_due_when_the_minutes_since_the_last_save_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock, never = training.SaveClock(2.5), training.SaveClock(0)
    due = []
    for now[0] in (100.0, 249.9, 250.0, 400.0):
        due.append(clock.due())
        assert never.due() == 0
    assert due == [0, 0, 1, 1]
    clock.restart()
    assert clock.due() == 0
    now[0] = 550.0
    assert clock.due() == 1
