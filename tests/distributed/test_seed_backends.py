"""Mesh coordinates and backends (seed page 002): ours against the published behaviour.

Each docstring names the line of SEED_NOTES that it answers, as section.item or section (function).
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
from tests.distributed.contrast import both_sides, contrast
from tests.harness import run_ranks


@both_sides
def test_a_mesh_that_holds_a_rank_twice_is_an_error_of_its_own(side: str) -> None:
    """SEED_NOTES 3 (get_mesh_coordinates): an assert, which vanishes with -O."""

    def check(rank: int, coordinates: Callable[..., Any]) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert coordinates(mesh, rank=3) == [1, 1]
        assert coordinates(mesh, rank=9) is None
        assert utils.get_mesh_coordinates(mesh) == [rank // 2, rank % 2]
        twice = SimpleNamespace(mesh=torch.tensor([[0, 1], [1, 2]]))
        with pytest.raises(ValueError, match=r"rank 1 is at \[\[0, 1\], \[1, 0\]\]"):
            coordinates(twice, rank=1)

    contrast(
        side, check, utils.get_mesh_coordinates, published.get_mesh_coordinates, symptom="AssertionError", world_size=4
    )


@both_sides
def test_backends_of_others_are_known(side: str) -> None:
    """SEED_NOTES 3 (backend_supports_cpu): custom backends."""

    def check(rank: int, supports_cpu: Callable[[str], bool]) -> None:
        dist.Backend.register_backend("homemade", lambda *arguments: None, devices=["cpu", "xpu"])
        assert supports_cpu("homemade"), "unknown"
        assert supports_cpu("gloo")
        assert not supports_cpu("nccl")

    contrast(
        side,
        check,
        utils.backend_supports_cpu,
        published.backend_supports_cpu,
        symptom="unknown",
        world_size=1,
        init=False,
    )


def test_what_backends_support() -> None:
    """Seed page 002 (backend_supports_cuda, backend_supports_cpu)."""
    table = {"gloo": (True, False), "nccl": (False, True), "cpu:gloo,cuda:nccl": (True, True), "mpi": (True, False)}
    for name, expected in table.items():
        assert (utils.backend_supports_cpu(name), utils.backend_supports_cuda(name)) == expected
    with pytest.raises(ValueError, match="backend=smoke"):
        utils.backend_supports_cpu("smoke")
    assert utils.backend_supports_cpu()
    assert utils.backend_supports_cuda() == torch.cuda.is_available()
    assert run_ranks(1, lambda rank: (utils.backend_supports_cpu(), utils.backend_supports_cuda())) == [(True, False)]


def test_a_group_started_without_a_backends_name_is_understood() -> None:
    """Seed page 002: torch then chooses the backend by the tensor's device."""

    def check(rank: int) -> tuple[bool, str]:
        dist.init_process_group()
        utils.barrier()
        return utils.backend_supports_cpu(), str(start_process_group().device)

    assert run_ranks(2, check, init=False) == [(True, "cpu")] * 2
