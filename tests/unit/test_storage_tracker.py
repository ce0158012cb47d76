"""The tracker of a dry run counts what real storages hold, operator by operator."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from components.planning.dry_run.fake_rank import FakeRank, Peak, StorageTracker, fake_process_group, gloo_copy_bytes
from tests.harness import run_ranks

MIB = 2**20


def test_tracker_counts_storages_while_they_exist() -> None:
    with StorageTracker() as tracker:
        tracker.phase = lambda: "first"
        kept = torch.zeros(MIB, dtype=torch.uint8)
        view = kept[: MIB // 2].view(-1, 2)  # no memory of its own
        assert tracker.bytes == MIB
        temporary = torch.zeros(2 * MIB, dtype=torch.uint8)
        del temporary
        assert tracker.bytes == MIB
        assert tracker.peak == Peak(3 * MIB, "aten::zeros", "first")
        del kept
        assert tracker.bytes == MIB, view.shape
        del view
        assert tracker.bytes == 0
        tracker.restart()
        assert tracker.peak.bytes == 0


def test_tracker_reads_resized_storages_again() -> None:
    """FSDP2 frees gathered parameters by resizing their storages, which is no operator."""
    with StorageTracker() as tracker:
        gathered = torch.zeros(4 * MIB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(0)
        other = torch.zeros(3 * MIB, dtype=torch.uint8)
        assert tracker.bytes == other.nbytes
        assert tracker.peak.bytes == 4 * MIB  # not 7 MiB
        gathered.untyped_storage().resize_(4 * MIB)
        assert tracker.bytes == 7 * MIB


def test_tracker_of_fake_tensors_agrees_with_real_ones() -> None:
    def step() -> None:
        weight = torch.ones(512, 256, requires_grad=True)
        (torch.ones(1024, 256) @ weight.t()).relu().square().sum().backward()

    with StorageTracker() as real:
        step()
    fake = FakeRank()
    fake.allocates_fakes = True
    with fake, StorageTracker() as played:
        step()
    assert played.peak == real.peak
    assert real.peak.bytes > 4 * 1024 * 512


def test_tracker_leaves_out_the_global_shapes_of_dtensor() -> None:
    """DTensor runs an operator on fake tensors of the global shape to find the shape of its output."""

    def body(rank: int) -> tuple[int, int]:
        fake = FakeRank()
        with fake_process_group(0, 8):
            mesh = init_device_mesh("cpu", (8,))
            fake.allocates_fakes = True
            with fake, StorageTracker() as tracker:
                sharded = distribute_tensor(torch.zeros(8, MIB), mesh, [Shard(0)])
                before = tracker.bytes
                tracker.restart()
                kept = sharded * 3
                return tracker.peak.bytes - before, kept.to_local().nbytes

    ((peak, expected),) = run_ranks(1, body, init=False)
    assert peak == expected == 4 * MIB


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("c10d::_allgather_base_", 4 * 80),
        ("c10d::_reduce_scatter_base_", 4 * 10),
        ("_c10d_functional::all_gather_into_tensor", 4 * 7),
        ("_c10d_functional::reduce_scatter_tensor", 4 * 80),
        ("c10d::allreduce_", 0),
        ("fsdp::all_gather_copy_in", 0),
    ],
)
def test_gloo_copies_outputs_of_gathers_and_inputs_of_reductions(operator: str, expected: int) -> None:
    args = (torch.zeros(80), torch.zeros(10))
    assert gloo_copy_bytes(operator, args, torch.zeros(7)) == expected
