"""Ranks, nodes, variables, mesh coordinates and backends, compared with the published behavior of OLMo-core.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from components.distributed import init, utils
from components.distributed.process.environment import RankEnvironmentError
from components.distributed.process.groups import NotInGroupError
from components.distributed.process.process_group import start_process_group
from components.protocol.errors import ConfigError
from tests.distributed import published
from tests.distributed.contrast import against_published, alone, nodes_of_two, without
from tests.harness import join_world, run_ranks

LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
init_check = partial(against_published, utils.init_distributed, published.init_distributed, init=False)


@against_published(utils, published, symptom="DID NOT RAISE", world_size=3, env=lambda rank: {"OLMO_SHARED_FS": "1"})
def test_queries_on_a_group_raise_on_non_member_ranks(rank: int, module: Any) -> None:
    """OLMo-core get_world_size, get_fs_local_rank: return -1 on ranks outside the group."""
    group = dist.new_group([1, 2])
    if rank:
        assert module.get_world_size(group) == 2
        assert module.get_fs_local_rank(group) == rank - 1
        assert module.get_rank(group) == rank - 1
        return
    assert module.get_rank(group) == -1  # torch's convention, which OLMo-core documents, too
    for function in (module.get_world_size, module.get_fs_local_rank):
        with pytest.raises(NotInGroupError):
            function(group)


@against_published(utils.get_local_rank, published.get_local_rank, symptom="DID NOT RAISE", env=without(*LOCAL))
def test_missing_local_rank_raises_instead_of_returning_zero(rank: int, get_local_rank: Callable[[], int]) -> None:
    """OLMo-core get_local_rank: returns 0 on both ranks of a node if LOCAL_RANK is not set."""
    with pytest.raises(RankEnvironmentError, match=f"LOCAL_RANK is not set on rank {rank} of 2"):
        get_local_rank()


@against_published(
    utils,
    published,
    symptom="KeyError: 'LOCAL_WORLD_SIZE'",
    world_size=4,
    env=lambda rank: {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": None, "NUM_NODES": "2"},
)
def test_local_world_size_is_derived_from_num_nodes(rank: int, module: Any) -> None:
    """OLMo-core validate_env_vars: accepts NUM_NODES alone; get_local_world_size then raises KeyError."""
    module.validate_env_vars()
    assert module.get_local_world_size() == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NUM_NODES": "7"}, "NUM_NODES=7: must lie between 1 and the number of processes, 2"),
        ({"NUM_NODES": "2"}, "NUM_NODES=2: contradicts LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: must lie between 1 and WORLD_SIZE=2"),
    ],
    ids=["more nodes than ranks", "no ranks left", "node larger than world"],
)
@against_published(utils, published, symptom="DID NOT RAISE")
def test_impossible_node_counts_are_rejected(rank: int, module: Any, variables: dict[str, str], message: str) -> None:
    """OLMo-core get_num_nodes: trusts NUM_NODES, and returns 0 if LOCAL_WORLD_SIZE exceeds the world size."""
    os.environ |= variables
    for function in (module.get_num_nodes, module.validate_env_vars):
        with pytest.raises(RankEnvironmentError, match=message):
            function()


def _two_ranks_and_one(rank: int) -> dict[str, str | None]:
    """Environment of nodes of two ranks and of one."""
    local = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2" if rank < 2 else "1"}
    return {**local, "GROUP_WORLD_SIZE": "2"}


@against_published(utils, published, symptom=r"assert [13] == 2", world_size=3, env=_two_ranks_and_one)
def test_num_nodes_counts_nodes_of_unequal_size(rank: int, module: Any) -> None:
    """OLMo-core get_num_nodes: floor division, wrong for nodes of unequal size (here of 2 ranks and 1)."""
    assert module.get_num_nodes() == 2


def test_env_vars_that_contradict_the_process_group_are_all_reported() -> None:
    def check(rank: int) -> None:
        os.environ |= {"RANK": "5", "WORLD_SIZE": "9"}
        with pytest.raises(RankEnvironmentError) as caught:
            utils.validate_env_vars()
        assert [problem.split(":")[0] for problem in caught.value.problems[:2]] == ["RANK=5", "WORLD_SIZE=9"]

    run_ranks(2, check)


def test_group_ranks_are_translated_to_global_ranks() -> None:
    def check(rank: int) -> tuple[int, int]:
        group = dist.new_group([1, 2])
        assert utils.is_distributed()
        return utils.get_global_rank(2), utils.get_global_rank(1, group) if rank else 2

    assert run_ranks(3, check) == [(2, 2)] * 3


@init_check(symptom=r"'0', '1'", env=alone(HARNESS_PORT=str(15000 + os.getpid() % 15000)))
def test_explicit_rank_and_world_size_are_exported_to_the_environment(
    rank: int, init_distributed: Callable[..., None]
) -> None:
    """OLMo-core init_distributed: with rank= and world_size=, exports RANK=0 and WORLD_SIZE=1 on every rank."""
    url = f"tcp://127.0.0.1:{os.environ['HARNESS_PORT']}"
    init_distributed("gloo", rank=rank, world_size=2, init_method=url)
    exported = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NUM_NODES")]
    assert exported == [str(rank), "2", str(rank), "2", "1"]
    assert "MASTER_PORT" not in os.environ
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
    init.destroy_global_state()
    assert "RANK" not in os.environ
    assert "OLMO_SHARED_FS" not in os.environ


@init_check(symptom="assert '3' == '0'", world_size=1, env=alone(LOCAL_RANK="3"))
def test_stale_local_rank_is_reset_in_a_single_process(rank: int, init_distributed: Callable[..., None]) -> None:
    """OLMo-core _bootstrap_single_process_distributed_env: keeps a stale LOCAL_RANK=3."""
    init_distributed("gloo")
    assert dist.get_world_size() == 1
    assert os.environ["LOCAL_RANK"] == "0"
    assert utils.get_local_rank() == 0


@init_check(symptom="Missing env var LOCAL_RANK", env=without(*LOCAL))
def test_missing_local_rank_is_derived_at_init(rank: int, init_distributed: Callable[..., None]) -> None:
    """OLMo-core init_distributed, validate_env_vars: a missing LOCAL_RANK is an error, or a bare KeyError."""
    init_distributed("gloo")
    assert (utils.get_local_rank(), utils.get_local_world_size(), utils.get_num_nodes()) == (rank, 2, 1)


@init_check(symptom="initialised with cpu:gloo, not gloo", init=False)
def test_equivalent_backends_are_accepted(rank: int, init_distributed: Callable[..., None]) -> None:
    """OLMo-core init_distributed: compares backend names as strings. An unavailable backend is still rejected here."""
    dist.init_process_group(
        "cpu:gloo", store=dist.FileStore(os.environ["HARNESS_RENDEZVOUS_FILE"], 2), rank=rank, world_size=2
    )
    init_distributed("gloo")
    with pytest.raises(ConfigError, match="backend=nccl: the process group already runs on cpu:gloo"):
        init_distributed("nccl")


@init_check(
    symptom="still shared",
    world_size=4,
    published_timeout=4,
    env=lambda rank: {**nodes_of_two(rank), "OLMO_SHARED_FS": "1"},
)
def test_shared_filesystem_flag_can_be_turned_off_again(rank: int, init_distributed: Callable[..., None]) -> None:
    """OLMo-core init_distributed: shared_filesytem=False does not unset OLMO_SHARED_FS if it is already set."""
    join_world()
    init_distributed("gloo", shared_filesytem=False)
    assert utils.get_fs_local_rank() == rank % 2, "still shared"
    if init_distributed is utils.init_distributed:
        init_distributed("gloo", shared_filesystem=True)
        assert utils.get_fs_local_rank() == rank
        with pytest.raises(ConfigError, match="contradicts"):
            init_distributed("gloo", shared_filesytem=False, shared_filesystem=True)
        os.environ["OLMO_SHARED_FS"] = "0"
        init_distributed("gloo")  # the default does not override an explicit setting
        assert utils.get_fs_local_rank() == rank % 2


@against_published(utils.get_mesh_coordinates, published.get_mesh_coordinates, symptom="AssertionError", world_size=4)
def test_mesh_with_a_duplicate_rank_raises_value_error(rank: int, coordinates: Callable[..., Any]) -> None:
    """OLMo-core get_mesh_coordinates: uses an assert, which -O removes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert coordinates(mesh, rank=3) == [1, 1]
    assert coordinates(mesh, rank=9) is None
    assert utils.get_mesh_coordinates(mesh) == [rank // 2, rank % 2]
    duplicate = SimpleNamespace(mesh=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match=r"rank 1 is at \[\[0, 1\], \[1, 0\]\]"):
        coordinates(duplicate, rank=1)


@against_published(
    utils.backend_supports_cpu, published.backend_supports_cpu, symptom="unknown", world_size=1, init=False
)
def test_registered_custom_backends_are_recognized(rank: int, supports_cpu: Callable[[str], bool]) -> None:
    """OLMo-core backend_supports_cpu: does not recognize custom backends."""
    dist.Backend.register_backend("homemade", lambda *arguments: None, devices=["cpu", "xpu"])
    assert supports_cpu("homemade"), "unknown"
    assert supports_cpu("gloo")
    assert not supports_cpu("nccl")


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
