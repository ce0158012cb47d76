"""Shutting down a distributed run, compared with the published behavior of NeMo AutoModel and KempnerForge.

Each docstring names the published function and the weakness that the test covers. Tests marked `both_implementations`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.distributed import init
from components.distributed.process import process_group
from tests.distributed import published
from tests.distributed.contrast import alone, both_implementations, contrast, srun
from tests.harness import join_world, run_ranks, start_ranks


@both_implementations
def test_atexit_cleanup_is_registered_once(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo AutoModel initialize_distributed: registers another exit handler on every start."""

    def check(rank: int, functions: tuple[Callable[..., Any], Callable[[], None]]) -> None:
        initialize, destroy = functions
        for _ in range(3):
            initialize("gloo")
            destroy()
        calls = []
        monkeypatch.setattr(dist, "is_initialized", lambda: bool(calls.append(1)))
        atexit._run_exitfuncs()
        assert len(calls) == 1

    contrast(
        implementation,
        check,
        (init.initialize_distributed, init.destroy_global_state),
        (published.initialize_distributed, published.destroy_global_state),
        symptom="AssertionError",
        world_size=1,
        init=False,
        env=alone(),
    )


@both_implementations
def test_sigint_handler_is_restored_after_destruction(implementation: str) -> None:
    """NeMo AutoModel destroy_global_state: resets SIGINT to its default action."""

    def check(rank: int, destroy: Callable[[], None]) -> None:
        def handler(number: int, frame: Any) -> None:
            raise KeyboardInterrupt("mine")

        signal.signal(signal.SIGINT, handler)
        destroy()
        assert signal.getsignal(signal.SIGINT) is handler
        assert not dist.is_initialized()

    contrast(
        implementation,
        check,
        init.destroy_global_state,
        published.destroy_global_state,
        symptom="AssertionError",
        world_size=1,
    )


@both_implementations
def test_sigint_handler_is_restored_if_destruction_fails(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo AutoModel destroy_global_state: leaves SIGINT ignored if the destruction raises."""

    def fail() -> None:
        raise OSError("cannot")

    def check(rank: int, destroy: Callable[[], None]) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits SIG_IGN
        monkeypatch.setattr(dist, "destroy_process_group", fail)
        with pytest.raises(OSError, match="cannot"):
            destroy()
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    contrast(
        implementation,
        check,
        init.destroy_global_state,
        published.destroy_global_state,
        symptom="AssertionError",
        world_size=1,
    )


@both_implementations
def test_group_can_be_destroyed_from_any_thread(implementation: str) -> None:
    """NeMo AutoModel destroy_global_state: calls signal.signal, which raises outside the main thread."""

    def check(rank: int, destroy: Callable[[], None]) -> None:
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

    contrast(
        implementation,
        check,
        init.destroy_global_state,
        published.destroy_global_state,
        symptom="signal only works in main thread",
        world_size=1,
    )


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


@both_implementations
def test_destruction_restores_the_environment(implementation: str) -> None:
    """KempnerForge destroy_distributed: leaves the exported variables, which later calls read as the current world."""

    def check(rank: int, functions: tuple[Callable[..., Any], Callable[[], None]]) -> None:
        get_world_info, destroy = functions
        before = dict(os.environ)
        assert get_world_info() == (rank, rank, 2)
        assert os.environ["RANK"] == str(rank)  # as KempnerForge documents
        assert os.environ.get("LOCAL_WORLD_SIZE", "2") == "2"
        join_world()  # reads RANK and WORLD_SIZE
        dist.barrier()  # a rank that leaves first would end a peer's connecting
        destroy()
        assert dict(os.environ) == before

    contrast(
        implementation,
        check,
        (init.get_world_info, init.destroy_distributed),
        (published.get_world_info, published.destroy_distributed),
        symptom="AssertionError",
        init=False,
        env=srun,
    )


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
    monkeypatch.setattr(process_group, "DRAIN_TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(after=3))
    process_group._drain_device()
    assert len(queries) == 4
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(after=10**9))
    began = time.monotonic()
    process_group._drain_device()
    assert time.monotonic() - began < 5
