"""Rank variables and the rendezvous address, compared with NeMo AutoModel's init_utils and KempnerForge's setup.

Each docstring names the published function and the weakness that the test covers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from components.distributed import init, utils
from components.distributed.process.environment import (
    RankEnvironmentError,
    export_variables,
    read_lone_local_variables,
    read_rank_variables,
    restore_variables,
    tasks_on_node,
)
from components.distributed.process.rendezvous import master_address
from components.protocol.errors import ConfigError
from tests.distributed import published
from tests.distributed.contrast import alone, both_implementations, contrast
from tests.harness import run_ranks

STEP = {  # task 3 of a step of 4 on two nodes
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n3,n4",
    "SLURM_JOB_NODELIST": "n[1-4]",
}


def single(
    implementation: str, check: Callable[[Any], None], ours: Any, published: Any, symptom: str, **variables: str
) -> None:
    """Run a check in one process whose only launcher variables are these."""
    contrast(
        implementation,
        lambda rank, implementation: check(implementation),
        ours,
        published,
        symptom=symptom,
        world_size=1,
        init=False,
        env=alone(**variables),
    )


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

    single(
        implementation,
        check,
        init.get_world_info,
        published.get_world_info,
        "DID NOT RAISE|invalid literal",
        **variables,
    )


@both_implementations
def test_allocation_without_step_is_a_single_process(implementation: str) -> None:
    """KempnerForge get_world_info: plain python inside salloc or a batch script waited for 7 other ranks."""

    def check(get_world_info: Callable[[], Any]) -> None:
        assert get_world_info() == (0, 0, 1)
        assert "RANK" not in os.environ

    batch = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    single(implementation, check, init.get_world_info, published.get_world_info, r"\(0, 0, 8\)", **batch)
    if implementation == "ours":  # srun -n1, like srun --pty
        step = {**batch, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}
        single(implementation, check, init.get_world_info, None, "", **step)


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

    run_ranks(1, check, init=False, env=alone(**variables, **local))
    run_ranks(1, check, init=False, env=alone(**variables, **local, **shape))


def test_interactive_shell_of_allocation_is_a_single_process() -> None:
    """Slurm's interactive step is one task with a step id and the job's SLURM_NTASKS."""
    shell = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}

    def check(rank: int) -> None:
        assert init.get_world_info() == (0, 0, 1)
        assert "RANK" not in os.environ

    run_ranks(1, check, init=False, env=alone(**shell, SLURM_LOCALID="0"))


def test_slurm_task_without_task_count_is_rejected() -> None:
    with pytest.raises(RankEnvironmentError, match="SLURM_NTASKS is not set although SLURM_PROCID=3 is"):
        read_rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "3"})
    with pytest.raises(RankEnvironmentError, match="SLURM_PROCID=3: must lie between 0"):
        read_rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"})


def test_local_variables_are_read_without_rank_and_world_size() -> None:
    """NeMo AutoModel get_local_rank_preinit, get_local_world_size_preinit: need no RANK and WORLD_SIZE."""

    def check(rank: int) -> tuple[int, int]:
        return init.get_local_rank_preinit(), init.get_local_world_size_preinit()

    def found(**variables: str) -> tuple[int, int]:
        return run_ranks(1, check, init=False, env=alone(**variables))[0]

    assert found(LOCAL_RANK="3", LOCAL_WORLD_SIZE="4") == (3, 4)
    assert found(LOCAL_RANK="3") == (3, 1)
    assert found(LOCAL_WORLD_SIZE="4") == (0, 4)
    assert found(LOCAL_RANK="3", SLURM_PROCID="0", SLURM_NTASKS="8") == (3, 1)  # a batch shell
    assert found() == (0, 1)
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
        single(
            implementation,
            lambda module: _assert_equal(module.get_world_info(), (1, 1, 2)),
            init,
            None,
            "",
            **STEP,
            **torchrun,
        )


def _assert_equal(value: Any, expected: Any) -> None:
    assert value == expected


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
            assert {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
                "RANK": "3",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
            }
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
        ("2(x3),1", 0, 2),
        ("2(x3),1", 2, 2),
        ("2(x3),1", 3, 1),
        ("4", 0, 4),
        ("1,3(x2)", 1, 3),
        ("2", 1, None),
        ("", 0, None),
    ],
)
def test_slurm_tasks_per_node_is_parsed(text: str, node: int, tasks: int | None) -> None:
    """KempnerForge get_world_info: LOCAL_WORLD_SIZE was never set."""
    assert tasks_on_node(text, node) == tasks


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
        found = {master_address(read_rank_variables(task), task) for task in tasks}
        assert len(found) == 1
        host, port = found.pop()
        assert host == "n3"  # first node of the step, not necessarily of the job
        assert 10000 <= port < 30000
        ports.add(port)
    assert len(ports) == 3
    explicit = {**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert master_address(read_rank_variables(explicit), explicit) == ("head", 1234)


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
        master_address(read_rank_variables(environ), environ)


def test_compressed_node_list_without_scontrol_is_rejected_on_several_nodes(tmp_path: Path) -> None:
    """KempnerForge init_distributed: a failing scontrol left MASTER_ADDR empty; containers have none."""
    environ = {**STEP, "SLURM_STEP_NODELIST": "n[3-4]", "PATH": str(tmp_path)}
    with pytest.raises(RankEnvironmentError, match=r"SLURM_STEP_NODELIST=n\[3-4\] needs scontrol"):
        master_address(read_rank_variables(environ), environ)
    one_node = {**environ, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert master_address(read_rank_variables(one_node), one_node)[0] == "127.0.0.1"
