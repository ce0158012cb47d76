"""The private parts of torch that a simulation uses exist, and its tensors have sizes but no memory."""

from __future__ import annotations

import importlib

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from components.planning.fake_rank import (
    _PROPAGATION,
    FakeRank,
    Peak,
    StorageTracker,
    _gloo_copy_bytes,
    fake_process_group,
)
from tests.harness import run_ranks

PRIVATE = {
    "torch._subclasses.fake_tensor": ["FakeTensor", "FakeTensorMode.from_tensor", "FakeTensorMode.__torch_dispatch__"],
    "torch.distributed.tensor._sharding_prop": [f"ShardingPropagator.{_PROPAGATION}"],
    "torch.testing._internal.distributed.fake_pg": ["FakeStore"],
    "torch.distributed.distributed_c10d": ["Backend.FAKE"],
    **(
        {
            "torch.distributed.pipelining.schedules": ["_PipelineSchedule._warmup_p2p"],
            "torch.distributed.pipelining.stage": ["InferenceMode.STATIC"],
        }
        if Version(torch.__version__).release >= (2, 12)
        else {"torch.distributed.pipelining.stage": ["PipelineStage._get_init_p2p_neighbors_ops"]}
    ),
    "torch": ["UntypedStorage._cdata", "_C._current_graph_task_id", "ops.aten._grouped_mm"],
}
"""Module -> attributes that components/planning/fake_rank.py and the pipeline's schedule need of it."""
MIB = 2**20


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PRIVATE.items() for name in names])
def test_private_part_of_torch_exists(module: str, name: str) -> None:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), (
            f"torch {torch.__version__} has no {module}.{name}: adapt components/planning/fake_rank.py"
        )
        found = getattr(found, part)


def test_tensors_become_fake_when_a_meta_model_gets_memory() -> None:
    fake = FakeRank()
    with fake:
        host = torch.arange(4)
        assert host.tolist() == [0, 1, 2, 3]  # a model is built with values
        model = torch.nn.Linear(4, 10**12, device="meta").to_empty(device="cpu")
        assert isinstance(model.weight, FakeTensor)
        assert model.weight.untyped_storage().nbytes() == 4 * 4 * 10**12
        assert isinstance(model.weight.int(), FakeTensor)  # torch runs it as an allocation and a copy
        fake.allocates_fakes = True
        output = model(torch.zeros(2, 4))
        output.sum().backward()
        assert isinstance(model.weight.grad, FakeTensor)
        assert torch.tensor([3, 4]).sum().tolist() == 7  # values of the host


def test_fake_process_group_has_the_real_world_size() -> None:
    def body(rank: int) -> tuple[int, int]:
        with fake_process_group(3000, 4096):
            torch.distributed.all_reduce(torch.zeros(1))
            result = torch.distributed.get_rank(), torch.distributed.get_world_size()
        assert not torch.distributed.is_initialized()
        return result

    assert run_ranks(1, body, init=False) == [(3000, 4096)]


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
    with fake, StorageTracker() as simulated:
        step()
    assert simulated.peak == real.peak
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
    assert _gloo_copy_bytes(operator, args, torch.zeros(7)) == expected
