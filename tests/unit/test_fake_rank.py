"""The private parts of torch that a dry run uses exist, and its tensors have sizes but no memory."""

from __future__ import annotations

import importlib

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor

from components.planning.dry_run.fake_rank import PROPAGATION, FakeRank, fake_process_group
from tests.harness import run_ranks

PRIVATE = {
    "torch._subclasses.fake_tensor": ["FakeTensor", "FakeTensorMode.from_tensor", "FakeTensorMode.__torch_dispatch__"],
    "torch.distributed.tensor._sharding_prop": [f"ShardingPropagator.{PROPAGATION}"],
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
"""Module -> attributes that components/planning/dry_run and the pipeline's schedule need of it."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PRIVATE.items() for name in names])
def test_private_part_of_torch_exists(module: str, name: str) -> None:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), (
            f"torch {torch.__version__} has no {module}.{name}: adapt components/planning/dry_run/fake_rank.py"
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
