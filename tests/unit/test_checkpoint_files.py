"""Retention and timing of saves, and manifests and names that no save writes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components import training
from components.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ManifestError,
    list_checkpoints,
    reasons_to_keep,
    remove,
)
from components.config.schema.run import CheckpointConfig
from components.protocol.run_files import checkpoint_folders, unfinished_checkpoints


def manifest_of(serial: int, step: int, loss: float | None = None, ephemeral: bool = False) -> Manifest:
    return Manifest(step, serial, {"world": 1}, {}, {}, eval_loss=loss, ephemeral=ephemeral)


def history(*saves: str) -> list[Manifest]:
    """Parse saves, oldest first: `40` is step 40, `40e` is ephemeral (saved by time), `40=2.5` has an eval loss, and
    `40+2.5` an eval reward."""
    manifests = []
    for serial, text in enumerate(saves, start=1):
        (step, _, loss), (_, _, reward) = text.partition("+")[0].partition("="), text.partition("+")
        manifest = manifest_of(serial, int(step.rstrip("e")), float(loss) if loss else None, step.endswith("e"))
        manifests.append(replace(manifest, eval_reward=float(reward) if reward else None))
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
    ("10+1 20+3 30+2 40+0", {"keep": 1, **BEST}, [20, 40]),  # of rewards, the highest is the best
    ("10+3 20+3 30+2 40", {"keep": 1, **BEST}, [10, 40]),
    ("10+-2 20+-1 30+-3 40=-9", {"keep": 1, **BEST}, [20, 40]),
    ("15e+9 20+3 30+2", {"keep": 1, **BEST}, [20, 30]),
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


HASH = "0" * 32
BODY = {
    "format": 2,
    "step": 1,
    "serial": 1,
    "mesh": {"world": 1},
    "versions": {},
    "files": {"a": {"bytes": 1, "xxh3": [HASH]}},
    "saved": "2026-11-27T20:40:00+00:00",
    "eval_loss": None,
    "ephemeral": False,
}


def text_of(body: object) -> str:
    """Return a manifest with its own hash, as a save writes it."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "body": body})


def test_a_manifest_as_a_save_writes_it_is_read() -> None:
    assert Manifest.parse(text_of(BODY)).files == {"a": FileRecord(1, [HASH])}
    early = {name: value for name, value in BODY.items() if name not in ("saved", "eval_loss", "ephemeral")}
    assert Manifest.parse(text_of(early).encode()).saved == ""
    assert Manifest.parse(text_of(BODY)).eval_reward is None
    assert Manifest.parse(text_of(BODY | {"eval_reward": 0.5})).eval_reward == 0.5


NAMES = ["..", ".", "", "a\0", "/etc/passwd", "..\\x", "a/b", "a\x1b]0;t\x07", "a\n", "a" * 256, "manifest.json"]
VALUES: list[dict[str, Any]] = [
    *({"files": {name: {"bytes": 0, "xxh3": []}}} for name in NAMES),
    *({"files": {"a": {"bytes": size, "xxh3": [HASH]}}} for size in (-1, "5", 1.0, True, None, 1 << 63, 1 << 26 | 1)),
    *({"files": {"a": {"bytes": 1, "xxh3": hashes}}} for hashes in (None, [], [1], HASH, [HASH, HASH])),
    *({"files": files} for files in ([1], None, {"a": 1}, {"a": {}}, {"a": {"bytes": 1, "xxh3": [HASH], "more": 1}})),
    *({name: value} for name in ("step", "serial") for value in ("x", float("nan"), [1], -1, True, None, 10**30)),
    *({"mesh": mesh} for mesh in ([1], {"world": -1}, {"world": "1"})),
    *({"saved": saved} for saved in ("yesterday", 5)),
    *({name: value} for name in ("eval_loss", "eval_reward") for value in ("x", float("nan"), float("inf"), True)),
    *({"ephemeral": value} for value in ("no", 1, None)),
    *({"format": value} for value in (1, None, "2")),
    {"more": 1},
]


@pytest.mark.parametrize("change", VALUES, ids=lambda change: json.dumps(change)[:40])
def test_values_that_no_save_writes_are_damage(change: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="^manifest.json "):
        Manifest.parse(text_of(BODY | change))


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("content", [DEEP, '{"a":' * 100_000, "", "[]", "7", '{"files": []}', b"\xff\xfe", text_of([])])
def test_what_is_no_manifest_is_damage(content: str | bytes) -> None:
    with pytest.raises(ManifestError, match=r"^manifest.json .{,200}$"):
        Manifest.parse(content)


def checkpoint(folder: Path, serial: int) -> Path:
    """Write a checkpoint with one file."""
    path = folder / f"step_{serial}"
    path.mkdir(parents=True)
    (path / "a").write_bytes(b"a")
    Manifest(serial, serial, {"world": 1}, {}, {"a": FileRecord(1, [HASH])}).write(path)
    return path


def test_odd_names_and_files_beside_checkpoints_are_named_or_left(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    kept = [checkpoint(folder, serial) for serial in (1, 2)]
    for name in ("step_" + "9" * 200, "step_\u0663", "step_1x", "notes", "step_3.tmp-mine", "old.tmp-0123abcd"):
        (folder / name).mkdir()
    (folder / "step_4").write_text("a file")
    os.mkfifo(folder / "step_5")
    (folder / "step_6").mkdir()
    os.mkfifo(folder / "step_6" / "manifest.json")
    (folder / "step_7").mkdir()
    (folder / "step_7" / "manifest.json").write_text('{"mine": 1}')
    assert [path.name for path in checkpoint_folders(folder)] == [f"step_{number}" for number in (1, 2, 4, 5, 6, 7)]
    entries = list_checkpoints(tmp_path, CheckpointConfig(keep=1))
    assert [entry.path for entry in entries if not entry.problems] == kept
    assert all("manifest.json" in problem or "no such folder" in problem for e in entries for problem in e.problems)
    assert unfinished_checkpoints(folder) == []
    for name in ("extra.json", "more.safetensors", ".DS_Store"):
        (kept[1] / name).write_text("{}")
    os.mkfifo(kept[1] / "pipe.json")
    (newest,) = [entry for entry in list_checkpoints(tmp_path, CheckpointConfig(keep=1)) if entry.reasons]
    assert newest.path == kept[1]
    assert newest.manifest is not None
    others = [".DS_Store", "extra.json", "more.safetensors", "pipe.json"]
    assert newest.manifest.strangers(newest.path) == others
    (folder / "step_2.others").mkdir()
    remove(kept)
    assert not kept[0].exists()
    assert sorted(os.listdir(folder / "step_2.others-2")) == others
    assert (folder / "step_2.others-2" / "extra.json").read_text() == "{}"
