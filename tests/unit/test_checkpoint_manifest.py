"""Manifests that no save writes, and names in a checkpoint folder that no save gives."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from components.checkpoint.manifest import FileRecord, Manifest, ManifestError, list_checkpoints, remove
from components.config.schema.run import CheckpointConfig
from components.protocol.run_files import checkpoint_folders, unfinished_checkpoints

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


NAMES = ["..", ".", "", "a\0", "/etc/passwd", "..\\x", "a/b", "a\x1b]0;t\x07", "a\n", "a" * 256, "manifest.json"]
VALUES: list[dict[str, Any]] = [
    *({"files": {name: {"bytes": 0, "xxh3": []}}} for name in NAMES),
    *({"files": {"a": {"bytes": size, "xxh3": [HASH]}}} for size in (-1, "5", 1.0, True, None, 1 << 63, 1 << 26 | 1)),
    *({"files": {"a": {"bytes": 1, "xxh3": hashes}}} for hashes in (None, [], [1], HASH, [HASH, HASH])),
    *({"files": files} for files in ([1], None, {"a": 1}, {"a": {}}, {"a": {"bytes": 1, "xxh3": [HASH], "more": 1}})),
    *({name: value} for name in ("step", "serial") for value in ("x", float("nan"), [1], -1, True, None, 10**30)),
    *({"mesh": mesh} for mesh in ([1], {"world": -1}, {"world": "1"})),
    *({"saved": saved} for saved in ("yesterday", 5)),
    *({"eval_loss": loss} for loss in ("x", float("nan"), float("inf"), True)),
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
