"""Mesh coordinates and backends, compared with the published behavior of OLMo-core.

Each docstring names the published function and the weakness that the test covers. Tests marked `both_implementations`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from components.distributed import utils
from components.distributed.process.process_group import start_process_group
from tests.distributed import published
from tests.distributed.contrast import both_implementations, contrast
from tests.harness import run_ranks


@both_implementations
def test_mesh_with_a_duplicate_rank_raises_value_error(implementation: str) -> None:
    """OLMo-core get_mesh_coordinates: uses an assert, which -O removes."""

    def check(rank: int, coordinates: Callable[..., Any]) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert coordinates(mesh, rank=3) == [1, 1]
        assert coordinates(mesh, rank=9) is None
        assert utils.get_mesh_coordinates(mesh) == [rank // 2, rank % 2]
        duplicate = SimpleNamespace(mesh=torch.tensor([[0, 1], [1, 2]]))
        with pytest.raises(ValueError, match=r"rank 1 is at \[\[0, 1\], \[1, 0\]\]"):
            coordinates(duplicate, rank=1)

    contrast(
        implementation,
        check,
        utils.get_mesh_coordinates,
        published.get_mesh_coordinates,
        symptom="AssertionError",
        world_size=4,
    )


@both_implementations
def test_registered_custom_backends_are_recognized(implementation: str) -> None:
    """OLMo-core backend_supports_cpu: does not recognize custom backends."""

    def check(rank: int, supports_cpu: Callable[[str], bool]) -> None:
        dist.Backend.register_backend("homemade", lambda *arguments: None, devices=["cpu", "xpu"])
        assert supports_cpu("homemade"), "unknown"
        assert supports_cpu("gloo")
        assert not supports_cpu("nccl")

    contrast(
        implementation,
        check,
        utils.backend_supports_cpu,
        published.backend_supports_cpu,
        symptom="unknown",
        world_size=1,
        init=False,
    )


def test_backends_report_supported_devices() -> None:
    table = {"gloo": (True, False), "nccl": (False, True), "cpu:gloo,cuda:nccl": (True, True), "mpi": (True, False)}
    for name, expected in table.items():
        assert (utils.backend_supports_cpu(name), utils.backend_supports_cuda(name)) == expected
    with pytest.raises(ValueError, match="backend=smoke"):
        utils.backend_supports_cpu("smoke")
    assert utils.backend_supports_cpu()
    assert utils.backend_supports_cuda() == torch.cuda.is_available()
    assert run_ranks(1, lambda rank: (utils.backend_supports_cpu(), utils.backend_supports_cuda())) == [(True, False)]


def test_group_initialized_without_a_backend_name_supports_cpu() -> None:
    """Without a backend name, torch selects the backend by the device of the tensor."""

    def check(rank: int) -> tuple[bool, str]:
        dist.init_process_group()
        utils.barrier()
        return utils.backend_supports_cpu(), str(start_process_group().device)

    assert run_ranks(2, check, init=False) == [(True, "cpu")] * 2
