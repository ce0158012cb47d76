"""Damage to a published checkpoint of every kind is noticed, told by file name, and stepped around."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from components.checkpoint import find_checkpoint, load_model_weights, verify
from components.checkpoint.manifest import Manifest
from components.config.errors import ConfigError
from tests.distributed.test_checkpoint_crash import assert_whole, save, start
from tests.harness import run_ranks


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    bit = int(place * 8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "flipped bit": lambda path, other: flip(path, 0.7),
    "flipped first bit": lambda path, other: flip(path, 0.0),
    "truncated": lambda path, other: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path, other: os.truncate(path, 0),
    "extended": lambda path, other: path.write_bytes(path.read_bytes() + b"\0"),
    "removed": lambda path, other: path.unlink(),
    "that of another step": lambda path, other: shutil.copy(other / path.name, path) and None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_by_file_name_and_the_checkpoint_before_is_taken(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = save(tmp_path / "run", 1), save(tmp_path / "run", 2)
    names = sorted(path.name for path in newer.iterdir())
    assert len(names) == 4
    for name in names:
        if name == "manifest.json" and kind == "that of another step":
            continue  # a manifest of another step makes every file a wrong one: the next test
        run_dir = tmp_path / f"{kind}-{name}"
        shutil.copytree(tmp_path / "run", run_dir)
        damaged = run_dir / "checkpoints" / newer.name
        DAMAGE[kind](damaged / name, run_dir / "checkpoints" / older.name)
        if (damaged / name).exists() and (damaged / name).read_bytes() == (newer / name).read_bytes():
            assert name.startswith("random")  # the random state did not move between the two saves
            continue
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert assert_whole(run_dir, {1}).name == older.name
        assert any(name in record.getMessage() and str(damaged) in record.getMessage() for record in caplog.records)
        with pytest.raises(ConfigError, match=rf"run.resume=.*step_2: not a whole checkpoint: .*{name}"):
            find_checkpoint(run_dir, str(damaged))
        with pytest.raises(ConfigError, match=name):
            load_model_weights(damaged, start()[0])


def test_shards_that_are_swapped_or_foreign_are_refused(tmp_path: Path) -> None:
    run_ranks(2, lambda rank: [save(tmp_path, step) and None for step in (1, 2)])
    newest = tmp_path / "checkpoints" / "step_2"
    first, second = sorted(newest.glob("*.safetensors"))
    first.rename(newest / "x")
    second.rename(first)
    (newest / "x").rename(second)
    assert {problem.split()[0] for problem in verify(newest)} == {first.name, second.name}
    shutil.copy(tmp_path / "checkpoints" / "step_1" / "manifest.json", newest / "manifest.json")
    assert verify(newest)
    whole = tmp_path / "checkpoints" / "step_1"
    shutil.copy(whole / first.name, whole / "shard-00003-model-00001-of-00001.safetensors")
    assert verify(whole) == ["shard-00003-model-00001-of-00001.safetensors does not belong to it"]


def test_two_hundred_random_bits_are_all_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    files = sorted(path.iterdir())
    dice = random.Random(0)
    for _ in range(200):
        victim = dice.choice(files)
        before = victim.read_bytes()
        flip(victim, dice.random())
        assert any(victim.name in problem for problem in verify(path)), victim
        victim.write_bytes(before)
    assert verify(path) == []


def test_ranks_share_the_reading_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert blocks <= first + second < blocks + 8  # each block once, besides manifests
    assert min(first, second) >= blocks // 2
    assert [name for _, name in run_ranks(2, body, 0)] == ["step_1", "step_1"]
