"""Starting and ending a distributed run, compared with the published behavior of NeMo AutoModel and KempnerForge.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.distributed import init
from components.distributed.process import process_group
from components.distributed.process.environment import RankEnvironmentError
from components.distributed.process.process_group import (
    DistInfo,
    _choose_backend,
    start_process_group,
)
from components.distributed.process.rendezvous import RendezvousError
from components.protocol.errors import ConfigError
from tests.distributed import published
from tests.distributed.contrast import against_published, alone, both_implementations, contrast, srun, without
from tests.harness import join_world, run_ranks, start_ranks

initialize_check = partial(against_published, init.initialize_distributed, published.initialize_distributed, init=False)
destroy_check = partial(against_published, init.destroy_global_state, published.destroy_global_state, world_size=1)


@initialize_check(symptom="(?i)timed out|timeout")
def test_init_timeout_does_not_limit_later_collectives(rank: int, initialize: Callable[..., Any]) -> None:
    """NeMo AutoModel initialize_distributed: a barrier that waits longer than `timeout_minutes` ends the run."""
    initialize("gloo", timeout_minutes=2 / 60)
    if rank == 1:
        time.sleep(2.8)
    dist.barrier()


@initialize_check(symptom="AssertionError", world_size=1, env=alone())
def test_dist_info_reports_the_actual_backend_and_device(rank: int, initialize: Callable[..., Any]) -> None:
    """NeMo AutoModel initialize_distributed: reports the requested nccl although the group runs on gloo."""
    for info in (initialize("nccl"), initialize("nccl")):
        assert info.backend == dist.get_backend() == "gloo"
        assert info.device == torch.device("cpu")
        assert (info.rank, info.world_size, info.is_main) == (0, 1, True)


def test_dist_info_is_frozen_and_describes_an_existing_group() -> None:
    """NeMo AutoModel DistInfo: mutable, and wrong for a group that was initialized on another backend."""

    def check(rank: int) -> DistInfo:
        info = init.initialize_distributed("cpu:gloo,cuda:nccl")
        with pytest.raises(FrozenInstanceError):
            info.rank = 3  # type: ignore[misc]
        return info

    infos = run_ranks(2, check)
    assert infos == [DistInfo("gloo", rank, 2, torch.device("cpu"), rank == 0) for rank in (0, 1)]


def test_nccl_is_always_paired_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo AutoModel initialize_distributed: a single process gets gloo alone, even with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for world_size in (1, 8):
        for requested in (None, "nccl", "cpu:gloo,cuda:nccl"):
            assert _choose_backend("auto", requested, world_size) == (True, "cpu:gloo,cuda:nccl")
    assert _choose_backend("auto", "gloo", 8) == (False, "gloo")
    assert _choose_backend("cpu", None, 8) == (False, "gloo")
    with pytest.raises(ConfigError, match="backend=nccl is for CUDA"):
        _choose_backend("cpu", "nccl", 8)


def test_cuda_backend_without_a_visible_device_is_rejected() -> None:
    """Nothing falls back silently; a single process that requests nccl runs on gloo and reports it."""
    for device, backend, world_size in (("cuda", None, 1), ("auto", "nccl", 2)):
        with pytest.raises(ConfigError, match="no CUDA device is visible"):
            _choose_backend(device, backend, world_size)
    with pytest.raises(ConfigError, match=r"cluster\.device=tpu"):
        _choose_backend("tpu", None, 1)
    assert _choose_backend("auto", "nccl", 1) == (False, "gloo")


def test_local_rank_wraps_around_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo AutoModel initialize_distributed: with one visible GPU per task, local rank 3 is an invalid device index."""
    devices = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    process_group.use_cuda_device(local_rank=3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    process_group.use_cuda_device(local_rank=3)
    assert devices == [0, 1]


@initialize_check(symptom="DID NOT RAISE", world_size=1, env=alone(RANK="3"))
def test_rank_without_world_size_is_rejected(rank: int, initialize: Callable[..., Any]) -> None:
    """NeMo AutoModel initialize_distributed: treats RANK=3 without WORLD_SIZE as a single process."""
    with pytest.raises(ValueError, match="WORLD_SIZE is not set although RANK=3 is"):
        initialize("gloo")


def test_process_group_can_be_started_again_after_destruction() -> None:
    """A second start is a no-op while the group exists, and works on the same store after its destruction."""

    def check(rank: int) -> list[float]:
        sums = []
        for _ in range(3):
            first, second = start_process_group(), start_process_group()
            assert first == second
            value = torch.tensor([float(rank + 1)])
            dist.all_reduce(value)
            sums.append(value.item())
            init.destroy_global_state()
        return sums

    assert run_ranks(2, check, init=False) == [[3.0] * 3] * 2


def test_rendezvous_timeout_names_the_missing_rank() -> None:
    """KempnerForge _barrier_with_timeout: does not enforce its timeout, and does not name missing ranks."""

    def check(rank: int) -> None:
        start_process_group()
        init.destroy_global_state()
        if rank != 2:
            with pytest.raises(RendezvousError, match=r"rank\(s\) 2 did not arrive within 0.7 s"):
                start_process_group(rendezvous_timeout=timedelta(seconds=0.7))

    run_ranks(3, check, init=False)


def test_single_node_store_listens_on_loopback_only() -> None:
    """By default, a TCPStore on 127.0.0.1 listens on every interface, and gloo on the address of the host."""

    def check(rank: int) -> set[str]:
        if rank == 0 and "MESHBOOK_STORE_FD" in os.environ:
            assert os.fstat(int(os.environ["MESHBOOK_STORE_FD"]))
        start_process_group()
        dist.barrier()
        return _listening_addresses()

    loopback = {"0100007F"}
    for listener in (None, socket.create_server(("127.0.0.1", 0))):
        environment: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": None}
        if listener is not None:
            descriptor, port = listener.fileno(), listener.getsockname()[1]
            environment |= {"MESHBOOK_STORE_FD": str(descriptor), "MASTER_PORT": str(port)}
        results = run_ranks(2, check, init=False, env=lambda rank, e=environment: e)  # type: ignore[misc]
        assert results == [loopback, loopback]


def _listening_addresses() -> set[str]:
    """Return the local addresses (hexadecimal) on which this process listens."""
    sockets = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    inodes = {name[len("socket:[") : -1] for name in sockets if name.startswith("socket:[")}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":
                addresses.add(fields[1].split(":")[0])
    return addresses


@against_published(
    start_process_group,
    published.start_on_own_port,
    symptom="(?i)timeout|timed out|still running",
    init=False,
    env=without("MASTER_ADDR", "MASTER_PORT"),
    published_timeout=2.5,
)
def test_missing_master_address_is_rejected(rank: int, start: Callable[[], Any]) -> None:
    """KempnerForge init_distributed: each rank picks localhost and its own port, so the ranks never meet."""
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT not set"):
        start()


@both_implementations
def test_scontrol_failure_is_reported(implementation: str, tmp_path: Path) -> None:
    """KempnerForge init_distributed: ignores the exit status of scontrol, so MASTER_ADDR becomes the empty string."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'slurm_load: cannot contact controller' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    nodes = {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    path = f"{tmp_path}:{os.environ['PATH']}"

    def check(rank: int, start: Callable[[], Any]) -> None:
        with pytest.raises(RankEnvironmentError, match="status 1: slurm_load: cannot contact controller"):
            start()

    contrast(
        implementation,
        check,
        start_process_group,
        published.start_on_own_port,
        symptom="RANK expected|DistNetworkError|still running",
        world_size=1,
        init=False,
        env=lambda rank: srun(rank, PATH=path, **nodes),
    )


@pytest.mark.parametrize("step", [True, False], ids=["step's numbers", "job's numbers"])
def test_srun_step_initializes_without_a_master_address(step: bool) -> None:
    """Host and port are derived from the Slurm step, identically on all ranks."""
    names = ("NUM_TASKS", "NUM_NODES", "TASKS_PER_NODE", "NODELIST")
    more = {} if step else {**{f"SLURM_STEP_{name}": None for name in names}, "SLURM_NNODES": "1"}

    def check(rank: int) -> tuple[int, int, str | None]:
        info = start_process_group()
        dist.barrier()
        return info.rank, info.world_size, os.environ.get("MASTER_PORT")

    assert run_ranks(2, check, init=False, env=lambda rank: srun(rank, **more)) == [(0, 2, None), (1, 2, None)]


@against_published(
    (init.initialize_distributed, init.destroy_global_state),
    (published.initialize_distributed, published.destroy_global_state),
    symptom="AssertionError",
    world_size=1,
    init=False,
    env=alone(),
)
def test_atexit_cleanup_is_registered_once(
    rank: int, functions: tuple[Callable[..., Any], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo AutoModel initialize_distributed: registers another exit handler on every start."""
    initialize, destroy = functions
    for _ in range(3):
        initialize("gloo")
        destroy()
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(calls.append(1)))
    atexit._run_exitfuncs()
    assert len(calls) == 1


@destroy_check(symptom="AssertionError")
def test_sigint_handler_is_restored_after_destruction(rank: int, destroy: Callable[[], None]) -> None:
    """NeMo AutoModel destroy_global_state: resets SIGINT to its default action."""

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("mine")

    signal.signal(signal.SIGINT, handler)
    destroy()
    assert signal.getsignal(signal.SIGINT) is handler
    assert not dist.is_initialized()


@destroy_check(symptom="AssertionError")
def test_sigint_handler_is_restored_if_destruction_fails(
    rank: int, destroy: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo AutoModel destroy_global_state: leaves SIGINT ignored if the destruction raises."""

    def fail() -> None:
        raise OSError("cannot")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits SIG_IGN
    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(OSError, match="cannot"):
        destroy()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@destroy_check(symptom="signal only works in main thread")
def test_group_can_be_destroyed_from_any_thread(rank: int, destroy: Callable[[], None]) -> None:
    """NeMo AutoModel destroy_global_state: calls signal.signal, which raises outside the main thread."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            destroy()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not errors, repr(errors)
    assert not dist.is_initialized()


def test_deep_ep_buffers_are_freed_before_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best effort, as in NeMo AutoModel destroy_global_state: a failing buffer does not stop the shutdown."""

    def check(rank: int) -> list[str]:
        order: list[str] = []

        class Buffer:
            def __init__(self, name: str, explicitly_destroy: bool = True, fails: bool = False) -> None:
                self.name, self.explicitly_destroy, self.fails = name, explicitly_destroy, fails
                self.runtime: object | None = object()

            def destroy(self) -> None:
                assert dist.is_initialized()
                if self.fails:
                    raise RuntimeError("nvshmem")
                order.append(self.name)

        class ElasticBuffer(Buffer):
            pass

        deep_ep = types.ModuleType("deep_ep")
        deep_ep.Buffer, deep_ep.ElasticBuffer = Buffer, ElasticBuffer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
        freed_before = Buffer("freed before")
        freed_before.runtime = None
        buffers = [
            Buffer("explicit"),
            Buffer("failing", fails=True),
            ElasticBuffer("elastic"),
            Buffer("implicit", explicitly_destroy=False),
            freed_before,
        ]
        destroy = dist.destroy_process_group

        def recorded_destroy() -> None:
            order.append("group")
            destroy()

        monkeypatch.setattr(dist, "destroy_process_group", recorded_destroy)
        init.destroy_global_state()
        init.destroy_global_state()  # a second call is a no-op
        assert buffers[3].runtime is None, "the buffer without destroy() was not freed"
        return order

    assert run_ranks(1, check)[0] in (["explicit", "elastic", "group"], ["elastic", "explicit", "group"])


@against_published(
    (init.get_world_info, init.destroy_distributed),
    (published.get_world_info, published.destroy_distributed),
    symptom="AssertionError",
    init=False,
    env=srun,
)
def test_destruction_restores_the_environment(
    rank: int, functions: tuple[Callable[..., Any], Callable[[], None]]
) -> None:
    """KempnerForge destroy_distributed: leaves the exported variables, which later calls read as the current world."""
    get_world_info, destroy = functions
    before = dict(os.environ)
    assert get_world_info() == (rank, rank, 2)
    assert os.environ["RANK"] == str(rank)  # as KempnerForge documents
    assert os.environ.get("LOCAL_WORLD_SIZE", "2") == "2"
    join_world()  # reads RANK and WORLD_SIZE
    dist.barrier()  # a rank that leaves first would end a peer's connecting
    destroy()
    assert dict(os.environ) == before


def test_destruction_returns_if_a_peer_is_dead() -> None:
    """KempnerForge destroy_distributed: not protected against a peer that already died."""

    def check(rank: int) -> float:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1), async_op=True)
        began = time.monotonic()
        init.destroy_distributed()
        return time.monotonic() - began

    survivor, dead = start_ranks(2, check, timeout=20)
    assert dead.signal == "SIGKILL"
    assert survivor.ok, str(survivor)
    assert survivor.result < 15


def test_shutdown_waits_for_the_device_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """KempnerForge destroy_distributed: does not synchronize the device."""
    queries = []

    class Event:
        def __init__(self, after: int) -> None:
            self.after = after

        def record(self) -> None: ...

        def query(self) -> bool:
            queries.append(1)
            return len(queries) > self.after

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group, "backend_supports_cuda", lambda: True)
    monkeypatch.setattr(process_group, "_DRAIN_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(after=3))
    process_group._drain_device()
    assert len(queries) == 4
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(after=10**9))
    began = time.monotonic()
    process_group._drain_device()
    assert time.monotonic() - began < 5
