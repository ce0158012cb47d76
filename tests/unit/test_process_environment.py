"""Rank variables, rendezvous, network and seeds, compared with NeMo AutoModel's utils and KempnerForge's setup.

Each docstring names the published function and the weakness that the test covers.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from components import distributed
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.distributed import init, utils
from components.distributed.process import environment as network
from components.distributed.process.environment import (
    RankEnvironmentError,
    _tasks_on_node,
    bind_to_gpu,
    export_variables,
    read_lone_local_variables,
    read_rank_variables,
    restore_variables,
)
from components.distributed.process.groups import stream
from components.distributed.process.rendezvous import _master_address
from components.protocol.errors import ConfigError
from tests.distributed import published
from tests.distributed.contrast import alone, both_implementations, contrast
from tests.harness import run_ranks

STEP = {  # task 3 of a step of 4 on two nodes
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n3,n4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[1-4]",
}  # fmt: skip
CUDA = torch.device("cuda", 3)
SOCKETS = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}
ALL = frozenset(range(16))
NCCL = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def single(
    implementation: str, check: Callable[[Any], None], ours: Any, published: Any, symptom: str, **variables: str | None
) -> None:
    """Run a check in one process whose only launcher variables are these; None removes a variable."""

    def on_rank(rank: int, implementation: Any) -> None:
        check(implementation)

    env = {**alone()(0), **variables}
    contrast(implementation, on_rank, ours, published, symptom=symptom, world_size=1, init=False, env=lambda rank: env)


def in_one_process(check: Callable[[int], Any], **variables: str) -> Any:
    """Return what a check of our implementation returns in a process whose only launcher variables are these."""
    return run_ranks(1, check, init=False, env=alone(**variables))[0]


@both_implementations
def test_empty_variable_counts_as_unset(implementation: str) -> None:
    """NeMo AutoModel get_rank_safe, get_world_size_safe; KempnerForge get_world_info: RANK="" raised ValueError."""

    def check(module: Any) -> None:
        assert module.get_rank_safe() == 0
        assert module.get_world_size_safe() == 1
        assert module.get_world_info() == (0, 0, 1)

    single(implementation, check, init, published, "ValueError: invalid literal", RANK="", WORLD_SIZE="", LOCAL_RANK="")


@both_implementations
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "3"}, "WORLD_SIZE is not set although RANK=3 is"),
        ({"WORLD_SIZE": "2"}, "RANK is not set although WORLD_SIZE=2 is"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4: must lie between 0 and WORLD_SIZE - 1 = 3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1: must lie between 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one': must be a whole number"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2: must be 0 or"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}, "LOCAL_RANK=3: must be 0 or more and below"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8: must lie between 1 and"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID is not set although SLURM_STEP_NUM_TASKS=4 is"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_contradictory_variables_are_reported_by_name(
    implementation: str, variables: dict[str, str], message: str
) -> None:
    """KempnerForge get_world_info: rank < world size was not checked; partial environments were accepted."""

    def check(get_world_info: Callable[[], Any]) -> None:
        with pytest.raises(RankEnvironmentError, match=message) as caught:
            get_world_info()
        assert isinstance(caught.value, ConfigError)
        assert caught.value.problems

    symptom = "DID NOT RAISE|invalid literal"
    single(implementation, check, init.get_world_info, published.get_world_info, symptom, **variables)


@both_implementations
def test_allocation_without_step_is_a_single_process(implementation: str) -> None:
    """KempnerForge get_world_info: plain python inside salloc or a batch script waited for 7 other ranks."""

    def check(get_world_info: Callable[[], Any]) -> None:
        assert get_world_info() == (0, 0, 1)
        assert "RANK" not in os.environ

    batch = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    single(implementation, check, init.get_world_info, published.get_world_info, r"\(0, 0, 8\)", **batch)
    if implementation == "ours":
        step = {**batch, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}  # srun -n1, like srun --pty
        single(implementation, check, init.get_world_info, None, "", **step)
        shell = {**step, "SLURM_STEP_ID": "4294967290"}  # Slurm's interactive step
        single(implementation, check, init.get_world_info, None, "", **shell)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, (0, 0, 4)),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, (3, 1, 4)),
        ({"SLURM_PROCID": "3"}, (3, 1, 4)),
    ],
    ids=["step, task 0", "step, task 3", "task 3"],
)
def test_slurm_ntasks_is_the_world_size_within_a_step(
    variables: dict[str, str], expected: tuple[int, int, int]
) -> None:
    """KempnerForge get_world_info: reads SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS; sets the env:// variables."""
    local = {"SLURM_LOCALID": str(expected[1]), "SLURM_NTASKS": "4"}
    shape = {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2", "SLURM_NODEID": str(expected[0] // 2)}

    def check(rank: int) -> None:
        assert init.get_world_info() == expected
        exported = tuple(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        assert exported == expected
        assert init.get_rank_safe() == expected[0]
        assert init.is_rank_zero() == (expected[0] == 0)

    in_one_process(check, **variables, **local)
    in_one_process(check, **variables, **local, **shape)


def test_slurm_task_without_task_count_is_rejected() -> None:
    with pytest.raises(RankEnvironmentError, match="SLURM_NTASKS is not set although SLURM_PROCID=3 is"):
        read_rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "3"})
    with pytest.raises(RankEnvironmentError, match="SLURM_PROCID=3: must lie between 0"):
        read_rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"})


def test_local_variables_are_read_without_rank_and_world_size() -> None:
    """NeMo AutoModel get_local_rank_preinit, get_local_world_size_preinit: need no RANK and WORLD_SIZE."""

    def check(rank: int) -> tuple[int, int]:
        return init.get_local_rank_preinit(), init.get_local_world_size_preinit()

    assert in_one_process(check, LOCAL_RANK="3", LOCAL_WORLD_SIZE="4") == (3, 4)
    assert in_one_process(check, LOCAL_RANK="3") == (3, 1)
    assert in_one_process(check, LOCAL_WORLD_SIZE="4") == (0, 4)
    assert in_one_process(check, LOCAL_RANK="3", SLURM_PROCID="0", SLURM_NTASKS="8") == (3, 1)  # a batch shell
    assert in_one_process(check) == (0, 1)
    for wrong in ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, {"LOCAL_RANK": "-1"}, {"LOCAL_WORLD_SIZE": "0"}):
        with pytest.raises(RankEnvironmentError, match="LOCAL_.*: must be"):
            read_lone_local_variables(wrong)


@both_implementations
def test_launcher_variables_are_never_mixed(implementation: str) -> None:
    """KempnerForge get_world_info: RANK came from torchrun and WORLD_SIZE from Slurm."""

    def check(get_world_info: Callable[[], Any]) -> None:
        with pytest.raises(RankEnvironmentError, match="WORLD_SIZE is not set although RANK=1 is"):
            get_world_info()

    single(implementation, check, init.get_world_info, published.get_world_info, "DID NOT RAISE", **STEP, RANK="1")
    if implementation == "ours":
        torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        assert in_one_process(lambda rank: init.get_world_info(), **STEP, **torchrun) == (1, 1, 2)


@both_implementations
def test_srun_task_gets_rank_and_local_rank(implementation: str) -> None:
    """NeMo AutoModel get_local_rank_preinit: ignored SLURM_LOCALID. KempnerForge is_rank_zero: True on rank 3."""

    def check(module: Any) -> None:
        assert not module.is_rank_zero(), "is_rank_zero() is True on rank 3"
        assert module.get_rank_safe() == 3
        assert module.get_world_size_safe() == 4
        assert module.get_local_rank_preinit() == 1
        assert utils.get_rank() == 3
        if module is init:
            assert module.get_local_world_size_preinit() == 2
            assert module.get_world_info() == (3, 1, 4)
            exported = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
            assert {name: os.environ[name] for name in exported} == exported
            assert read_rank_variables().node == "slurm node 1"  # the exported variables do not hide the Slurm source

    single(implementation, check, init, published, "is True on rank 3", **STEP)


@both_implementations
def test_rank_is_available_before_process_group_init(implementation: str) -> None:
    """OLMo-core get_rank: RANK was ignored before init, so every rank was rank 0."""

    def check(get_rank: Callable[[], int]) -> None:
        assert get_rank() == 3

    single(implementation, check, utils.get_rank, published.get_rank, "assert 0 == 3", RANK="3", WORLD_SIZE="4")


@both_implementations
def test_explicit_rank_decides_is_rank_zero(implementation: str) -> None:
    """KempnerForge is_rank_zero: wrong under mp.spawn with explicit ranks, which sets no variables."""

    def check(rank: int, is_rank_zero: Callable[[], bool]) -> None:
        store = dist.FileStore(os.environ["HARNESS_RENDEZVOUS_FILE"], 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert is_rank_zero() == (rank == 0), f"rank {rank}"

    contrast(
        implementation, check, init.is_rank_zero, published.is_rank_zero, symptom="rank 1", init=False, env=alone()
    )


def test_missing_local_rank_raises_instead_of_defaulting() -> None:
    """NeMo AutoModel get_local_rank_preinit, get_local_world_size_preinit: a missing variable counted as 0 and 1."""

    def check(rank: int) -> tuple[int, int]:
        local = init.get_local_rank_preinit(), init.get_local_world_size_preinit()
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        for function in (init.get_local_rank_preinit, init.get_local_world_size_preinit):
            with pytest.raises(RankEnvironmentError, match=f"LOCAL_.* is not set on rank {rank} of 2"):
                function()
        return local

    assert run_ranks(2, check, init=False) == [(0, 2), (1, 2)]
    assert (init.get_local_rank_preinit(), init.get_local_world_size_preinit()) == (0, 1)


@pytest.mark.parametrize(
    ("text", "node", "tasks"),
    [
        *(("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1)),
        *(("4", 0, 4), ("1,3(x2)", 1, 3), ("2", 1, None), ("", 0, None)),
    ],
)
def test_slurm_tasks_per_node_is_parsed(text: str, node: int, tasks: int | None) -> None:
    """KempnerForge get_world_info: LOCAL_WORLD_SIZE was never set."""
    assert _tasks_on_node(text, node) == tasks


def test_exported_variables_are_restored() -> None:
    """KempnerForge get_world_info: environment writes were never undone. A child must not undo its parent's."""
    environ = {"RANK": "7", "KEEP": "1"}
    export_variables({"RANK": "0", "NEW": "a"}, environ)
    export_variables({"NEW": "b", "KEEP": "1"}, environ)
    assert (environ["RANK"], environ["NEW"]) == ("0", "b")
    child = {**environ, "MESHBOOK_EXPORTED": environ["MESHBOOK_EXPORTED"].replace(str(os.getpid()), "1")}
    restore_variables(child)
    assert (child["RANK"], child["NEW"]) == ("0", "b")
    restore_variables(environ)
    assert environ == {"RANK": "7", "KEEP": "1"}


def test_master_port_is_derived_from_job_and_step() -> None:
    """KempnerForge init_distributed: the port must be equal on all ranks, not ephemeral, and different per step."""
    ports = set()
    for step in range(3):
        tasks = [{**STEP, "SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank)} for rank in range(4)]
        found = {_master_address(read_rank_variables(task), task) for task in tasks}
        assert len(found) == 1
        host, port = found.pop()
        assert host == "n3"  # first node of the step, not necessarily of the job
        assert 10000 <= port < 30000
        ports.add(port)
    assert len(ports) == 3
    explicit = {**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert _master_address(read_rank_variables(explicit), explicit) == ("head", 1234)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MASTER_PORT": "70000", "MASTER_ADDR": "n1"}, "MASTER_PORT=70000: must lie between 1 and 65535"),
        ({"MASTER_PORT": "http", "MASTER_ADDR": "n1"}, "MASTER_PORT='http': must be a whole number"),
        ({"MASTER_ADDR": "n1"}, "MASTER_PORT not set: the 2 ranks need the address of rank 0"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR not set"),
    ],
)
def test_invalid_master_address_is_reported_by_name(variables: dict[str, str], message: str) -> None:
    """KempnerForge init_distributed: fell back to localhost and a random port."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", **variables}
    with pytest.raises(RankEnvironmentError, match=message):
        _master_address(read_rank_variables(environ), environ)


def test_compressed_node_list_without_scontrol_is_rejected_on_several_nodes(tmp_path: Path) -> None:
    """KempnerForge init_distributed: a failing scontrol left MASTER_ADDR empty; containers have none."""
    environ = {**STEP, "SLURM_STEP_NODELIST": "n[3-4]", "PATH": str(tmp_path)}
    with pytest.raises(RankEnvironmentError, match=r"SLURM_STEP_NODELIST=n\[3-4\] needs scontrol"):
        _master_address(read_rank_variables(environ), environ)
    one_node = {**environ, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert _master_address(read_rank_variables(one_node), one_node)[0] == "127.0.0.1"


def _fake_ip(folder: Path, output: str, status: int = 0) -> str:
    """Create a fake `ip` command that prints `output`; return a PATH that starts with its folder."""
    command = folder / "ip"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@both_implementations
def test_ib_child_interface_is_returned_without_parent_suffix(implementation: str, tmp_path: Path) -> None:
    """KempnerForge _detect_ib_interface: ib0.8001@ib0 was returned with its suffix."""
    interfaces = ("lo UNKNOWN 127.0.0.1/8", "ib1 DOWN", "ib2 UP", "ib0.8001@ib0 UP 10.0.0.1/24", "eth0 UP 10.1.0.1/24")
    path = _fake_ip(tmp_path, "\n".join(interfaces))

    def check(detect: Callable[[], Any]) -> None:
        assert detect() == "ib0.8001"

    single(implementation, check, init._detect_ib_interface, published._detect_ib_interface, "ib0.8001@ib0", PATH=path)


def test_roce_interface_is_detected() -> None:
    """KempnerForge _detect_ib_interface: RoCE interfaces were missed."""
    output = "lo UNKNOWN 127.0.0.1/8\neth0 UP 10.1.0.1/24\nens9 UP 10.2.0.1/24\n\n"
    assert network._first_rdma_interface(output, {"ens9"}) == "ens9"
    assert network._first_rdma_interface(output + "ibp3 UP 10.3.0.1/24\n", {"ens9"}) == "ibp3"
    assert network._first_rdma_interface(output, set()) is None


def test_failing_ip_command_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KempnerForge _detect_ib_interface: all errors were swallowed."""
    monkeypatch.setenv("PATH", _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24", status=2))
    assert init._detect_ib_interface() is None
    assert "`ip -br addr` failed" in caplog.text


@both_implementations
@pytest.mark.parametrize("interface", ["^lo,docker", "=lo"])
def test_nccl_interface_syntax_is_not_passed_to_gloo(implementation: str, interface: str) -> None:
    """KempnerForge _set_nccl_env: gloo failed with "Unable to find address for: ^lo"."""

    def check(set_nccl_env: Callable[[], None]) -> None:
        set_nccl_env()
        assert os.environ["NCCL_SOCKET_IFNAME"] == interface
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    variables = {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": None}
    symptom = "(?i)unable to find address|interface"
    single(implementation, check, init._set_nccl_env, published._set_nccl_env, symptom, **variables)


@both_implementations
def test_rdma_settings_require_an_rdma_interface(implementation: str, tmp_path: Path) -> None:
    """KempnerForge _set_nccl_env: NCCL_NET_GDR_LEVEL was set even without InfiniBand."""
    without_ib = _fake_ip(tmp_path, "lo UNKNOWN 127.0.0.1/8\neth0 UP 10.0.0.1/24")

    def check(set_nccl_env: Callable[[], None]) -> None:
        set_nccl_env()
        assert not {"NCCL_NET_GDR_LEVEL", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"} & set(os.environ)
        _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24")
        set_nccl_env()
        assert [os.environ[name] for name in NCCL] == ["ib0", "0", "2", "1"]

    single(implementation, check, init._set_nccl_env, published._set_nccl_env, "AssertionError", PATH=without_ib)


def test_plain_interface_name_is_shared_with_gloo_and_set_values_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """KempnerForge _set_nccl_env: gloo gets the same interface; disabled NCCL error handling logs a warning."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")  # so that monkeypatch restores it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    init._set_nccl_env()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "a stuck collective hangs" in caplog.text


def _network_address() -> str | None:
    """Return a non-loopback address of this machine. A UDP connect sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.parametrize("over_the_network", [True, False])
def test_recipe_ranks_get_nccl_settings_only_for_network_rendezvous(over_the_network: bool, tmp_path: Path) -> None:
    """The contract of conf/network/auto.yaml. Ranks that rendezvous over loopback need no NCCL settings."""
    address = _network_address() if over_the_network else "127.0.0.1"
    if address is None:
        pytest.skip("this machine has only a loopback address")
    path = _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24")

    def check(rank: int) -> list[str | None]:
        distributed.start_process_group("cpu")
        dist.barrier()
        return [os.environ.get(name) for name in NCCL]

    def environment(rank: int) -> dict[str, str | None]:
        return {"MASTER_ADDR": address, "PATH": path, "NCCL_NET_GDR_LEVEL": "5", **dict.fromkeys(NCCL[:2])}

    expected = ["ib0", "0", "5", "3"] if over_the_network else [None, None, "5", None]
    assert run_ranks(2, check, init=False, env=environment) == [expected] * 2


@both_implementations
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_invalid_for_numpy_leaves_torch_unseeded(implementation: str, seed: int) -> None:
    """KempnerForge _set_seed: numpy raised ValueError after torch had already been seeded."""

    def check(set_seed: Callable[..., None]) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with pytest.raises(ValueError):
            set_seed(seed, rank=0)
        assert torch.equal(torch.get_rng_state(), before), "torch was seeded"
        with pytest.raises(ConfigError, match=f"run.seed={seed}: with pipeline rank 0 it must lie between 0"):
            set_seed(seed, rank=0)

    single(implementation, check, init._set_seed, published._set_seed, "torch was seeded")


def test_generators_agree_within_a_pipeline_stage_and_differ_between_stages() -> None:
    """KempnerForge _set_seed."""

    def draw(**ranks: int) -> tuple[float, float, float]:
        init._set_seed(42, **ranks)
        return torch.rand(()).item(), random.random(), float(np.random.random())

    def check(rank: int) -> bool:
        first = draw(rank=0)
        assert first == draw(rank=5)
        assert not set(first) & set(draw(rank=0, pp_rank=1))
        return first == (torch.rand((), generator=torch.Generator().manual_seed(42)).item(), *first[1:])

    assert run_ranks(1, check, init=False) == [True]


def test_random_streams_differ_per_rank_coordinates() -> None:
    """KempnerForge _set_seed: no distinct stream per rank, e.g. for augmentation over dp, dropout over tp."""

    def draw(*coordinates: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=stream(42, *coordinates)).tolist())

    coordinates = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (12, 3), (1, 23), (2**40,)]
    assert len({draw(*each) for each in coordinates}) == len(coordinates)
    assert draw(1, 0) == draw(1, 0)
    assert draw(1) != tuple(torch.rand(4, generator=stream(43, 1)).tolist())


@both_implementations
def test_eval_shard_depends_on_strategy_not_on_config_class(implementation: str) -> None:
    """NeMo AutoModel dp_eval_sample_shard: the decision was an isinstance check of a config class."""

    @dataclass
    class Foreign:
        strategy: str = "ddp"

    def check(shard: Callable[..., Any]) -> None:
        ddp = ParallelismConfig(strategy=Strategy.ddp, dp_replicate=4, dp_shard=1)
        assert shard(ddp, 3, 4) == (3, 4)
        assert shard(Foreign(), 1, 2) == (1, 2)
        assert shard(ddp, 0, 1) is None
        assert shard(ParallelismConfig(strategy=Strategy.fsdp2), 3, 4) is None
        for wrong in ((ddp, 4, 4), (object(), 0, 2)):
            with pytest.raises(ConfigError):
                shard(*wrong)

    single(implementation, check, utils.dp_eval_sample_shard, published.dp_eval_sample_shard, r"None == \(3, 4\)")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """CPUs of the main thread 10, of thread 11 and of thread 12, which is bound to one CPU already."""
    threads: dict[int, set[int]] = {10: set(ALL), 11: set(ALL), 12: {2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: threads[thread or 10])
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: threads.update({thread: set(cpus)}))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return threads


def machine(root: Path, numa_node: int = 1) -> Path:
    gpu = root / "sys/bus/pci/devices/0000:dc:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{numa_node}\n")
    for node, cpus in SOCKETS.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for thread in (10, 11, 12):
        (root / f"proc/self/task/{thread}").mkdir(parents=True)
    return root


def test_all_threads_are_bound_to_the_node_of_the_gpu(tmp_path: Path, bound: dict[int, set[int]]) -> None:
    assert "the 8 of NUMA node 1" in bind_to_gpu(CUDA, machine(tmp_path))
    assert bound == {10: {4, 5, 6, 7, 12, 13, 14, 15}, 11: {4, 5, 6, 7, 12, 13, 14, 15}, 12: {2}}
    assert bind_to_gpu(CUDA, tmp_path) == ""  # already within the node


def test_cpus_that_the_job_may_not_use_are_left_out(tmp_path: Path, bound: dict[int, set[int]]) -> None:
    bound[10] = bound[11] = {0, 1, 6, 7}
    assert "the 2 of NUMA node 1" in bind_to_gpu(CUDA, machine(tmp_path))
    assert bound[10] == {6, 7}


def test_nothing_is_bound_without_a_gpu_or_a_node(
    tmp_path: Path, bound: dict[int, set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(bound)
    assert bind_to_gpu(torch.device("cpu"), machine(tmp_path / "cpu")) == ""
    assert bind_to_gpu(CUDA, machine(tmp_path / "one", numa_node=-1)) == ""
    assert bind_to_gpu(CUDA, tmp_path / "empty") == ""
    assert bound == before
    bound[10] = bound[11] = {0, 1}
    with caplog.at_level(logging.WARNING):
        assert bind_to_gpu(CUDA, machine(tmp_path / "elsewhere")) == ""
    assert bound[10] == {0, 1}
    assert "may not use any CPU of NUMA node 1, which GPU 0000:dc:00.0" in caplog.text
