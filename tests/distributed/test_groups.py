"""Ranks, nodes and environment variables of a process group, compared with the published behavior of OLMo-core.

Each docstring names the published function and the weakness that the test covers. Tests marked `both_implementations`
also run their check against a re-creation of the published behavior, which must fail.

Mesh coordinates and backends, compared with the published behavior of OLMo-core.
Each docstring names the published function and the weakness that the test covers. Tests marked `both_implementations`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from tests.distributed.contrast import both_implementations, contrast, nodes_of_two, without
from tests.harness import join_world, run_ranks

LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


@both_implementations
def test_queries_on_a_group_raise_on_non_member_ranks(implementation: str) -> None:
    """OLMo-core get_world_size, get_fs_local_rank: return -1 on ranks outside the group."""

    def check(rank: int, module: Any) -> None:
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

    contrast(
        implementation,
        check,
        utils,
        published,
        symptom="DID NOT RAISE",
        world_size=3,
        env=lambda rank: {"OLMO_SHARED_FS": "1"},
    )


@both_implementations
def test_missing_local_rank_raises_instead_of_returning_zero(implementation: str) -> None:
    """OLMo-core get_local_rank: returns 0 on both ranks of a node if LOCAL_RANK is not set."""

    def check(rank: int, get_local_rank: Callable[[], int]) -> None:
        with pytest.raises(RankEnvironmentError, match=f"LOCAL_RANK is not set on rank {rank} of 2"):
            get_local_rank()

    contrast(
        implementation,
        check,
        utils.get_local_rank,
        published.get_local_rank,
        symptom="DID NOT RAISE",
        env=without(*LOCAL),
    )


@both_implementations
def test_local_world_size_is_derived_from_num_nodes(implementation: str) -> None:
    """OLMo-core validate_env_vars: accepts NUM_NODES alone; get_local_world_size then raises KeyError."""

    def check(rank: int, module: Any) -> None:
        module.validate_env_vars()
        assert module.get_local_world_size() == 2

    contrast(
        implementation,
        check,
        utils,
        published,
        symptom="KeyError: 'LOCAL_WORLD_SIZE'",
        world_size=4,
        env=lambda rank: {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": None, "NUM_NODES": "2"},
    )


@both_implementations
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NUM_NODES": "7"}, "NUM_NODES=7: must lie between 1 and the number of processes, 2"),
        ({"NUM_NODES": "2"}, "NUM_NODES=2: contradicts LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: must lie between 1 and WORLD_SIZE=2"),
    ],
    ids=["more nodes than ranks", "no ranks left", "node larger than world"],
)
def test_impossible_node_counts_are_rejected(implementation: str, variables: dict[str, str], message: str) -> None:
    """OLMo-core get_num_nodes: trusts NUM_NODES, and returns 0 if LOCAL_WORLD_SIZE exceeds the world size."""

    def check(rank: int, module: Any) -> None:
        for function in (module.get_num_nodes, module.validate_env_vars):
            with pytest.raises(RankEnvironmentError, match=message):
                function()

    contrast(implementation, check, utils, published, symptom="DID NOT RAISE", env=lambda rank: dict(variables))


@both_implementations
def test_num_nodes_counts_nodes_of_unequal_size(implementation: str) -> None:
    """OLMo-core get_num_nodes: floor division, wrong for nodes of unequal size (here of 2 ranks and 1)."""

    def check(rank: int, module: Any) -> None:
        assert module.get_num_nodes() == 2

    def unequal(rank: int) -> dict[str, str | None]:
        return {
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2" if rank < 2 else "1",
            "GROUP_WORLD_SIZE": "2",
        }

    contrast(implementation, check, utils, published, symptom=r"assert [13] == 2", world_size=3, env=unequal)


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


@both_implementations
def test_explicit_rank_and_world_size_are_exported_to_the_environment(implementation: str) -> None:
    """OLMo-core init_distributed: with rank= and world_size=, exports RANK=0 and WORLD_SIZE=1 on every rank."""

    def check(rank: int, init_distributed: Callable[..., None]) -> None:
        url = f"tcp://127.0.0.1:{os.environ['HARNESS_PORT']}"
        init_distributed("gloo", rank=rank, world_size=2, init_method=url)
        exported = [
            os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NUM_NODES")
        ]
        assert exported == [str(rank), "2", str(rank), "2", "1"]
        assert "MASTER_PORT" not in os.environ
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
        init.destroy_global_state()
        assert "RANK" not in os.environ
        assert "OLMO_SHARED_FS" not in os.environ

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    port = str(15000 + os.getpid() % 15000)
    contrast(
        implementation,
        check,
        utils.init_distributed,
        published.init_distributed,
        symptom=r"'0', '1'",
        init=False,
        env=lambda rank: {**dict.fromkeys(names), "HARNESS_PORT": port},
    )


@both_implementations
def test_stale_local_rank_is_reset_in_a_single_process(implementation: str) -> None:
    """OLMo-core _bootstrap_single_process_distributed_env: keeps a stale LOCAL_RANK=3."""

    def check(rank: int, init_distributed: Callable[..., None]) -> None:
        init_distributed("gloo")
        assert dist.get_world_size() == 1
        assert os.environ["LOCAL_RANK"] == "0"
        assert utils.get_local_rank() == 0

    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    contrast(
        implementation,
        check,
        utils.init_distributed,
        published.init_distributed,
        symptom="assert '3' == '0'",
        world_size=1,
        init=False,
        env=lambda rank: {**dict.fromkeys(names), "LOCAL_RANK": "3"},
    )


@both_implementations
def test_missing_local_rank_is_derived_at_init(implementation: str) -> None:
    """OLMo-core init_distributed, validate_env_vars: a missing LOCAL_RANK is an error, or a bare KeyError."""

    def check(rank: int, init_distributed: Callable[..., None]) -> None:
        init_distributed("gloo")
        assert (utils.get_local_rank(), utils.get_local_world_size(), utils.get_num_nodes()) == (rank, 2, 1)

    contrast(
        implementation,
        check,
        utils.init_distributed,
        published.init_distributed,
        symptom="Missing env var LOCAL_RANK",
        init=False,
        env=without(*LOCAL),
    )


@both_implementations
def test_equivalent_backends_are_accepted(implementation: str) -> None:
    """OLMo-core init_distributed: compares backend names as strings. An unavailable backend is still rejected here."""

    def check(rank: int, init_distributed: Callable[..., None]) -> None:
        dist.init_process_group(
            "cpu:gloo", store=dist.FileStore(os.environ["HARNESS_RENDEZVOUS_FILE"], 2), rank=rank, world_size=2
        )
        init_distributed("gloo")
        with pytest.raises(ConfigError, match="backend=nccl: the process group already runs on cpu:gloo"):
            init_distributed("nccl")

    contrast(
        implementation,
        check,
        utils.init_distributed,
        published.init_distributed,
        symptom="initialised with cpu:gloo, not gloo",
        init=False,
    )


@both_implementations
def test_shared_filesystem_flag_can_be_turned_off_again(implementation: str) -> None:
    """OLMo-core init_distributed: shared_filesytem=False does not unset OLMO_SHARED_FS if it is already set."""

    def check(rank: int, init_distributed: Callable[..., None]) -> None:
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

    contrast(
        implementation,
        check,
        utils.init_distributed,
        published.init_distributed,
        symptom="still shared",
        world_size=4,
        published_timeout=4,
        init=False,
        env=lambda rank: {**nodes_of_two(rank), "OLMO_SHARED_FS": "1"},
    )


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
