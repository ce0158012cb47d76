"""A save on a full, failing or read-only disk: every rank raises the same error, published checkpoints stay intact.

Complete runs on such disks: tests/distributed/test_checkpoint_disk_runs.py.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch

from components.checkpoint import CheckpointError, save_checkpoint
from components.config.schema.run import CheckpointConfig
from components.watch.faults import POINTS, VARIABLE
from tests.distributed.disks import PAGE, fail_from_now_on, small_disk, thin_disk
from tests.distributed.test_checkpoint_crash import Run, assert_resumes_from, set_all, start
from tests.harness import run_ranks

AGREE_WITHIN = 30.0
MESSAGE = (
    r"checkpoint {folder}/checkpoints/step_2.tmp-\w+ could not be written \(its tensors are ([\d,]+) bytes, "
    r"{folder}/checkpoints has room for ([\d,]+)\): "
)
BYTES = (
    3 * 2 * (16 * 16 + 16) * 4 + 4 * 4
)  # two linear layers with biases: weights and two moments; a step count per tensor
POLICY = CheckpointConfig(keep=1)


def save(folder: Path, run: Run, step: int) -> Path:
    set_all(run, float(step))
    return save_checkpoint(folder, step, *run, {"step": step}, POLICY)


def save_fails(folder: Path, run: Run) -> tuple[str, int]:
    """Assert that saving step 2 fails with the same message on every rank; return it and the free bytes it reports."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        save(folder, run, 2)
    assert time.monotonic() - began < AGREE_WITHIN
    found = re.match(MESSAGE.format(folder=folder), str(caught.value))
    assert found, str(caught.value)
    assert int(found[1].replace(",", "")) == BYTES
    assert len(set(gather_texts(str(caught.value)))) == 1
    return str(caught.value), int(found[2].replace(",", ""))


def gather_texts(text: str) -> list[str]:
    texts = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts


def test_disk_that_fills_up_at_any_page_fails_on_every_rank(tmp_path: Path) -> None:
    """With 0, 1, 2, ... free pages until a save fits, so that every write is the failing one once."""

    def body(rank: int) -> tuple[int, set[str]]:
        run = start()
        save(disk.folder, run, 1)
        failing_ranks = set()
        for pages in range(100):
            if rank == 0:
                disk.fill(leave=pages * PAGE)
            torch.distributed.barrier()
            free = disk.free()
            torch.distributed.barrier()
            try:
                message, reported_free = save_fails(disk.folder, run)
            except pytest.fail.Exception:  # the save succeeded
                return pages, failing_ranks
            assert "No space left on device" in message
            assert abs(reported_free - free) <= 2 * PAGE  # the folder itself
            failing_ranks |= {name for name in ("rank 0", "rank 1") if name in message}
            torch.distributed.barrier()
            assert [path.name for path in (disk.folder / "checkpoints").iterdir()] == ["step_1"]
            assert_resumes_from(disk.folder, {1})
        raise AssertionError("the save never succeeds")

    with small_disk(tmp_path / "disk", "2m") as disk:
        (pages, failing_ranks), _ = run_ranks(2, body, timeout=120)
        assert pages > 10
        assert failing_ranks == {"rank 0", "rank 1"}
        assert_resumes_from(disk.folder, {2})
    print(f"\n{pages} of {pages} page counts too small: reported on both ranks, step 1 intact")


FAILING = [(call, [rank]) for call in ("open", "write", "fsync") for rank in (0, 1)]
FAILING += [("mkdir", [0, 1]), ("rename", [0])]  # a folder that one rank cannot create is created by the other


@pytest.mark.parametrize(("call", "ranks"), FAILING, ids=str)
def test_failing_system_call_fails_the_save_on_every_rank(call: str, ranks: list[int], tmp_path: Path) -> None:
    """The kernel returns EIO to these ranks only."""

    def body(rank: int) -> None:
        run = start()
        save(tmp_path, run, 1)
        torch.distributed.barrier()
        if rank in ranks:
            fail_from_now_on(call)
        message, _ = save_fails(tmp_path, run)
        assert "Input/output error" in message
        assert all(f"rank {each}" in message for each in ranks)

    run_ranks(2, body)
    assert_resumes_from(tmp_path, {1})
    run_ranks(2, lambda rank: save(tmp_path, start(), 2) and None)
    assert_resumes_from(tmp_path, {2})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_save(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start()
        save(tmp_path, run, 1)
        torch.distributed.barrier()
        fail_from_now_on("remove")
        save(tmp_path, run, 2)

    run_ranks(2, body)
    assert_resumes_from(tmp_path, {2})
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    run_ranks(2, lambda rank: save(tmp_path, start(), 3) and None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_3"]


def test_read_only_disk_fails_on_every_rank_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start()
        save(disk.folder, run, 1)
        torch.distributed.barrier()
        if rank == 0:
            assert disk.remount("ro")
        torch.distributed.barrier()
        assert "Read-only file system" in save_fails(disk.folder, run)[0]
        assert_resumes_from(disk.folder, {1})
        torch.distributed.barrier()
        if rank == 0:
            assert disk.remount("rw")
        torch.distributed.barrier()
        save(disk.folder, run, 2)
        assert_resumes_from(disk.folder, {2})

    with small_disk(tmp_path / "disk", "2m") as disk:
        run_ranks(2, body)


def test_overcommitted_disk_whose_fsync_fails_fails_the_save(tmp_path: Path) -> None:
    """Every write succeeds and only fsync fails, as on over-committed storage and some network file systems."""

    def body(rank: int) -> bool:
        run = start()
        save(tmp_path / "thin", run, 1)
        if rank == 0:
            backing.fill()
        torch.distributed.barrier()
        message, _ = save_fails(tmp_path / "thin", run)
        return "No space left on device" in message or "Input/output error" in message

    with thin_disk(tmp_path / "thin", "1500k") as backing:
        assert run_ranks(2, body) == [True, True]


ERRORS = {"enospc": "No space left on device", "eio": "Input/output error", "erofs": "Read-only file system"}


@pytest.mark.parametrize("kind", ERRORS)
def test_injected_error_at_each_fault_point_is_reported(kind: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start()
        for number, point in enumerate(POINTS):
            folder = tmp_path / str(number)
            save(folder, run, 1)
            os.environ[VARIABLE] = f"{kind}:{point}:rank0"
            torch.distributed.barrier()
            if point == "while_pruning":
                save(folder, run, 2)
                assert_resumes_from(folder, {2})
            elif point == "at_load":
                with pytest.raises(CheckpointError, match=f"could not be read: rank 0: OSError: .*{ERRORS[kind]}"):
                    assert_resumes_from(folder, {1})
            else:
                assert re.search(rf"rank 0: OSError: .*{ERRORS[kind]}", save_fails(folder, run)[0])
                assert_resumes_from(folder, {2 if point == "after_rename" else 1})
            assert os.environ[VARIABLE] == ("" if rank == 0 else f"{kind}:{point}:rank0:1")
            torch.distributed.barrier()

    run_ranks(2, body)


def test_save_on_a_slow_disk_succeeds(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        run = start()
        os.environ[VARIABLE] = "slow=0.5:after_shards:rank1,slow=0.5:before_rename"
        began = time.monotonic()
        save(tmp_path, run, 1)
        return time.monotonic() - began

    assert min(run_ranks(2, body)) > 1.0
    assert_resumes_from(tmp_path, {1})
