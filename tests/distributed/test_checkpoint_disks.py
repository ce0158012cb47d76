"""A save on a disk that is full, failing or read-only: every rank raises the same, nothing published is touched.

Whole runs on such disks: tests/distributed/test_checkpoint_disk_runs.py.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch

from components.checkpoint import CheckpointError, save_checkpoint
from components.config.schema.checkpoint import CheckpointConfig
from components.resilience.faults import POINTS, VARIABLE
from tests.distributed.disks import PAGE, fail_from_now_on, small_disk, thin_disk
from tests.distributed.test_checkpoint_crash import Run, assert_whole, set_all, start
from tests.harness import run_ranks

AGREE_WITHIN = 30.0
TOLD = (
    r"checkpoint {folder}/checkpoints/step_2.tmp-\w+ could not be written \(its tensors are ([\d,]+) bytes, "
    r"{folder}/checkpoints has room for ([\d,]+)\): "
)
BYTES = 3 * 2 * (16 * 16 + 16) * 4 + 4 * 4  # two matrices with biases: values, two averages; a counter of each
POLICY = CheckpointConfig(keep=1)


def save(folder: Path, run: Run, step: int) -> Path:
    set_all(run, float(step))
    return save_checkpoint(folder, step, *run, {"step": step}, POLICY)


def refused(folder: Path, run: Run) -> tuple[str, int]:
    """Step 2 cannot be saved: return what is told, the same on every rank, and the room that is told."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        save(folder, run, 2)
    assert time.monotonic() - began < AGREE_WITHIN
    found = re.match(TOLD.format(folder=folder), str(caught.value))
    assert found, str(caught.value)
    assert int(found[1].replace(",", "")) == BYTES
    assert len(set(torch_gather(str(caught.value)))) == 1
    return str(caught.value), int(found[2].replace(",", ""))


def torch_gather(text: str) -> list[str]:
    texts = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts


def test_a_disk_that_is_full_at_any_page(tmp_path: Path) -> None:
    """With room for no page, for one, for two, ... until a save fits: so each write is the one that fails."""

    def body(rank: int) -> tuple[int, set[str]]:
        run = start()
        save(disk.folder, run, 1)
        whose = set()
        for pages in range(100):
            if rank == 0:
                disk.fill(leave=pages * PAGE)
            torch.distributed.barrier()
            free = disk.free()
            torch.distributed.barrier()
            try:
                told, room = refused(disk.folder, run)
            except pytest.fail.Exception:  # it was saved
                return pages, whose
            assert "No space left on device" in told
            assert abs(room - free) <= 2 * PAGE  # the folder itself
            whose |= {part for part in ("rank 0", "rank 1") if part in told}
            torch.distributed.barrier()
            assert [path.name for path in (disk.folder / "checkpoints").iterdir()] == ["step_1"]
            assert_whole(disk.folder, {1})
        raise AssertionError("nothing ever fits")

    with small_disk(tmp_path / "disk", "2m") as disk:
        (pages, whose), _ = run_ranks(2, body, timeout=120)
        assert pages > 10
        assert whose == {"rank 0", "rank 1"}
        assert_whole(disk.folder, {2})
    print(f"\n{pages} of {pages} pages short: told on both ranks, step 1 whole")


FAILING = [(call, [rank]) for call in ("open", "write", "fsync") for rank in (0, 1)]
FAILING += [("mkdir", [0, 1]), ("rename", [0])]  # the folder that one rank cannot make the other one makes


@pytest.mark.parametrize(("call", "ranks"), FAILING, ids=str)
def test_a_system_call_that_fails(call: str, ranks: list[int], tmp_path: Path) -> None:
    """EIO from the kernel itself, for these ranks alone."""

    def body(rank: int) -> None:
        run = start()
        save(tmp_path, run, 1)
        torch.distributed.barrier()
        if rank in ranks:
            fail_from_now_on(call)
        told, _ = refused(tmp_path, run)
        assert "Input/output error" in told
        assert all(f"rank {each}" in told for each in ranks)

    run_ranks(2, body)
    assert_whole(tmp_path, {1})
    run_ranks(2, lambda rank: save(tmp_path, start(), 2) and None)
    assert_whole(tmp_path, {2})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_old_ones_that_cannot_be_removed_stop_nothing(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start()
        save(tmp_path, run, 1)
        torch.distributed.barrier()
        fail_from_now_on("remove")
        save(tmp_path, run, 2)

    run_ranks(2, body)
    assert_whole(tmp_path, {2})
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    run_ranks(2, lambda rank: save(tmp_path, start(), 3) and None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_3"]


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start()
        save(disk.folder, run, 1)
        torch.distributed.barrier()
        if rank == 0:
            assert disk.remount("ro")
        torch.distributed.barrier()
        assert "Read-only file system" in refused(disk.folder, run)[0]
        assert_whole(disk.folder, {1})
        torch.distributed.barrier()
        if rank == 0:
            assert disk.remount("rw")
        torch.distributed.barrier()
        save(disk.folder, run, 2)
        assert_whole(disk.folder, {2})

    with small_disk(tmp_path / "disk", "2m") as disk:
        run_ranks(2, body)


def test_a_disk_that_takes_what_it_cannot_keep(tmp_path: Path) -> None:
    """Every write succeeds, and only fsync tells: over-committed storage, some network file systems."""

    def body(rank: int) -> bool:
        run = start()
        save(tmp_path / "thin", run, 1)
        if rank == 0:
            backing.fill()
        torch.distributed.barrier()
        told, _ = refused(tmp_path / "thin", run)
        return "No space left on device" in told or "Input/output error" in told

    with thin_disk(tmp_path / "thin", "1500k") as backing:
        assert run_ranks(2, body) == [True, True]


ERRORS = {"enospc": "No space left on device", "eio": "Input/output error", "erofs": "Read-only file system"}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_each_point(kind: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start()
        for number, point in enumerate(POINTS):
            folder = tmp_path / str(number)
            save(folder, run, 1)
            os.environ[VARIABLE] = f"{kind}:{point}:rank0"
            torch.distributed.barrier()
            if point == "while_pruning":
                save(folder, run, 2)
                assert_whole(folder, {2})
            elif point == "at_load":
                with pytest.raises(CheckpointError, match=f"could not be read: rank 0: OSError: .*{ERRORS[kind]}"):
                    assert_whole(folder, {1})
            else:
                assert re.search(rf"rank 0: OSError: .*{ERRORS[kind]}", refused(folder, run)[0])
                assert_whole(folder, {2 if point == "after_rename" else 1})
            assert os.environ[VARIABLE] == ("" if rank == 0 else f"{kind}:{point}:rank0:1")
            torch.distributed.barrier()

    run_ranks(2, body)


def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        run = start()
        os.environ[VARIABLE] = "slow=0.5:after_shards:rank1,slow=0.5:before_rename"
        began = time.monotonic()
        save(tmp_path, run, 1)
        return time.monotonic() - began

    assert min(run_ranks(2, body)) > 1.0
    assert_whole(tmp_path, {1})
