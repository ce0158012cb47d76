"""Every kind of damage to a published checkpoint is detected, reported by file name, and avoided on resume."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from components.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_model_weights,
    manifest,
    save_checkpoint,
    verify,
)
from components.checkpoint.manifest import Manifest
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from tests.distributed.test_checkpoint_crash import assert_resumes_from, save, start
from tests.harness import run_ranks
from tests.suites import TORTURE

CORRUPTIONS = 1000 if TORTURE else 216


def flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    bit = int(position * 8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "random-00000.json"])
def test_failed_read_on_any_rank_is_no_damage(name: str, tmp_path: Path) -> None:
    """An older checkpoint would repeat steps, and later saves would remove the newer one."""
    for step in (1, 2):
        save(tmp_path, step)
    newest = tmp_path / "checkpoints" / "step_2"

    def fail(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]) == str(newest / name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(args[0]))

    def body(rank: int) -> str:
        sys.addaudithook(fail)
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(tmp_path, "auto")
        return str(caught.value)

    for message in run_ranks(2, body):
        assert f"Input/output error: '{newest / name}'" in message
        assert "could not be" in message
    assert find_checkpoint(tmp_path, "auto") == newest


def test_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    newest = save(tmp_path, 1)
    flip(newest / "state.json", 0.5)
    with pytest.raises(ConfigError, match=rf"run.dir={tmp_path}: all of its checkpoints are damaged .*{newest}; "):
        find_checkpoint(tmp_path, "auto")


def test_swapped_shards_are_detected_and_foreign_ones_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda rank: [save(tmp_path, step) and None for step in (1, 2)])
    newest = tmp_path / "checkpoints" / "step_2"
    first, second = sorted(newest.glob("*.safetensors"))
    first.rename(newest / "x")
    second.rename(first)
    (newest / "x").rename(second)
    assert {problem.split()[0] for problem in verify(newest)} == {first.name, second.name}
    shutil.copy(tmp_path / "checkpoints" / "step_1" / "manifest.json", newest / "manifest.json")
    assert verify(newest)
    intact = tmp_path / "checkpoints" / "step_1"
    shutil.copy(intact / first.name, intact / "shard-00003-model-00001-of-00001.safetensors")
    assert verify(intact) == []
    assert caplog.messages[-1].endswith("not of it, and not read: shard-00003-model-00001-of-00001.safetensors")


class Corruption:
    """Random ways to damage a checkpoint; each method returns file names, at least one of which must be reported."""

    def __init__(self, newer: Path, older: Path, seed: int) -> None:
        self.newer, self.older, self.rng = newer, older, random.Random(seed)
        self.pristine = {path.name: path.read_bytes() for path in sorted(newer.iterdir())}
        self.before = {path.name: path.read_bytes() for path in sorted(older.iterdir())}
        self.shards = [name for name in self.pristine if name.endswith(".safetensors")]

    def any_file(self) -> Path:
        return self.newer / self.rng.choice(list(self.pristine))

    def bit_flip(self) -> set[str]:
        path = self.any_file()
        flip(path, self.rng.random())
        return {path.name}

    def truncation(self) -> set[str]:
        path = self.any_file()
        os.truncate(path, self.rng.randrange(path.stat().st_size))
        return {path.name}

    def extension(self) -> set[str]:
        path = self.any_file()
        path.write_bytes(path.read_bytes() + b"\0")
        return {path.name}

    def missing_file(self) -> set[str]:
        path = self.any_file()
        path.unlink()
        return {path.name}

    def swapped_shards(self) -> set[str]:
        names = self.rng.sample(self.shards, 2)
        for name, other in zip(names, reversed(names), strict=True):
            (self.newer / name).write_bytes(self.pristine[other])
        return set(names)

    def zeroed_page(self) -> set[str]:
        path = self.any_file()
        data = bytearray(path.read_bytes())
        start = 4096 * self.rng.randrange(-(-len(data) // 4096))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
        path.write_bytes(data)
        return {path.name}

    def mixed_steps(self) -> set[str]:
        differing = [name for name in self.pristine if self.before[name] != self.pristine[name]]
        assert len(differing) > 3
        names = set(self.rng.sample(differing, self.rng.randrange(1, len(differing))))
        for name in names:
            (self.newer / name).write_bytes(self.before[name])
        return set(differing) - names if "manifest.json" in names else names

    def edited_manifest(self) -> set[str]:
        """Edit the manifest, with or without updating the manifest's own hash."""
        written = json.loads(self.pristine["manifest.json"])
        files = written["body"]["files"]
        name = self.rng.choice(list(files))
        edit = self.rng.choice(["step", "serial", "size", "hash", "forgotten", "invented"])
        if edit in ("step", "serial"):
            written["body"][edit] += self.rng.randrange(1, 9)
        elif edit == "size":
            files[name]["bytes"] += self.rng.choice([-1, 1])
        elif edit == "hash":
            position = self.rng.randrange(len(files[name]["xxh3"]))
            digest = files[name]["xxh3"][position]
            files[name]["xxh3"][position] = f"{int(digest, 16) ^ 1 << self.rng.randrange(128):032x}"
        elif edit == "forgotten":
            del files[name]
        else:
            files["more.safetensors"] = files[name]
        expected = {name, "more.safetensors"}
        if edit in ("step", "serial", "forgotten") or self.rng.random() < 0.5:
            expected = {"manifest.json"}
        else:
            body = json.dumps(written["body"], sort_keys=True).encode()
            written["sha256"] = hashlib.sha256(body).hexdigest()
        (self.newer / "manifest.json").write_text(json.dumps(written))
        return expected

    def restore(self) -> None:
        for path in self.newer.iterdir():
            path.unlink()
        for name, data in self.pristine.items():
            (self.newer / name).write_bytes(data)

    @property
    def changed(self) -> bool:
        return {path.name: path.read_bytes() for path in self.newer.iterdir()} != self.pristine


KINDS = [
    *("bit_flip", "truncation", "extension", "missing_file"),
    *("swapped_shards", "zeroed_page", "mixed_steps", "edited_manifest"),
]


def test_random_corruptions_are_detected_and_the_previous_checkpoint_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files are written by three ranks and have several hash blocks each."""
    monkeypatch.setattr("components.checkpoint.manifest.BLOCK_BYTES", 1024)

    def write(rank: int) -> None:
        for step in (1, 2):
            torch.manual_seed(10 * step + rank)  # different RNG states on every rank and step
            save(tmp_path, step)

    run_ranks(3, write)
    older, newer = tmp_path / "checkpoints" / "step_1", tmp_path / "checkpoints" / "step_2"
    corruption = Corruption(newer, older, seed=0)
    assert len(corruption.pristine) == 8  # shards and RNG states of three ranks, state, manifest
    detected, skipped = dict.fromkeys(KINDS, 0), 0
    while sum(detected.values()) < CORRUPTIONS:
        kind = KINDS[sum(detected.values()) % len(KINDS)]
        expected = getattr(corruption, kind)()
        if not corruption.changed:  # the zeroed page was zero before
            skipped += 1
            continue
        caplog.clear()
        assert find_checkpoint(tmp_path, "auto") == older, (kind, expected)
        warnings = [record.getMessage() for record in caplog.records]
        assert any(str(newer) in text and any(name in text for name in expected) for text in warnings), (kind, expected)
        if sum(detected.values()) % 5 == 0:  # changes the kind each time
            names = "|".join(map(re.escape, expected))
            with pytest.raises(ConfigError, match=rf"run.resume=.*step_2: not a complete checkpoint: .*({names})"):
                find_checkpoint(tmp_path, str(newer))
            with pytest.raises(ConfigError, match=names):
                load_model_weights(newer, start()[0])
        if sum(detected.values()) % 50 == 0:
            assert_resumes_from(tmp_path, {1})
        detected[kind] += 1
        corruption.restore()
    assert min(detected.values()) == CORRUPTIONS // len(KINDS)
    assert skipped < CORRUPTIONS // 20
    assert find_checkpoint(tmp_path, "auto") == newer


def test_corruption_on_the_way_to_the_disk_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is computed from the data in memory, not from what was written."""
    save(tmp_path, 1)
    fsync = os.fsync

    def corrupt(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{int(descriptor)}"))
        if path.suffix == ".safetensors":
            flip(path, 0.9)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", corrupt)
    newer = save(tmp_path, 2)
    assert verify(newer) == ["shard-00001-model-00001-of-00001.safetensors is damaged"]
    assert_resumes_from(tmp_path, {1})


@pytest.mark.skipif(not TORTURE, reason="a measurement: make torture")
def test_hashing_takes_at_most_5_percent_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process saves 268 MB of parameters and optimizer state."""
    hashing = 0.0
    update = manifest.HashedFile._hash

    def timed(self: manifest.HashedFile, data: memoryview) -> None:
        nonlocal hashing
        began = time.perf_counter()
        update(self, data)
        hashing += time.perf_counter() - began

    monkeypatch.setattr(manifest.HashedFile, "_hash", timed)
    model = torch.nn.Linear(4096, 5461)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    began = time.perf_counter()
    path = save_checkpoint(tmp_path, 1, model, optimizer, {}, CheckpointConfig(keep=1))
    total = time.perf_counter() - began
    size = Manifest.read(path).bytes
    print(f"{size / 1e6:.0f} MB saved in {total:.2f} s, hashed in {hashing:.3f} s: {hashing / total:.1%}")
    assert size > 268e6
    assert 0 < hashing < 0.05 * total


def test_ranks_split_the_verification_and_agree_on_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.checkpoint.manifest.BLOCK_BYTES", 512)  # many blocks in a small file

    def body(rank: int, damaged: int | None) -> tuple[int, str | None]:
        if damaged is None:
            save(tmp_path, 1), save(tmp_path, 2)
        elif rank == 0:
            flip(sorted((tmp_path / "checkpoints" / "step_2").glob("*.safetensors"))[damaged], 0.6)
        opened = [0]
        sys.addaudithook(
            lambda name, args: opened.__setitem__(0, opened[0] + (name == "open" and "step_2" in str(args[0])))
        )
        torch.distributed.barrier()
        found = find_checkpoint(tmp_path, "auto")
        return opened[0], found and found.name

    (first, one), (second, two) = run_ranks(2, body, None)
    assert one == two == "step_2"
    files = Manifest.read(tmp_path / "checkpoints" / "step_2").files
    blocks = sum(len(record.xxh3) for record in files.values())
    assert blocks > 20
    assert blocks <= first + second < blocks + 8  # each block is read once, plus the manifests
    assert min(first, second) >= blocks // 2
    assert [name for _, name in run_ranks(2, body, 0)] == ["step_1", "step_1"]
