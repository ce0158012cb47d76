"""Waiting for all ranks, with a timeout that holds, and with the names of those who did not come."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from components.distributed.process.backends import backend_supports_cuda
from components.distributed.process.groups import find_members, is_distributed, require_member
from components.distributed.process.store_sync import MissingRanks

logger = logging.getLogger(__name__)


class BarrierTimeoutError(RuntimeError):
    """Not all ranks came to a barrier in time; the message names the missing ones."""


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks in the group (seed page 002, OLMo-core), for at most the timeout of the group.

    Nothing to wait for without a process group. On CUDA the device of this process is named, which a
    barrier that is the first collective would otherwise guess.

    Raises NotInGroupError for a process outside `group`.
    """
    if is_distributed():
        require_member(group)
        dist.barrier(group, device_ids=_device_ids(group))


def missing_after(timeout: timedelta, group: dist.ProcessGroup | None = None) -> list[int]:
    """Wait for all members of `group`, and return the global ranks that did not come within `timeout`.

    All ranks get the same answer, late ones included. No process group takes part, so none is harmed by a
    timeout.
    """
    members = find_members(group)
    if members is None:
        return []
    try:
        members.sync("barrier").gather("", timeout)
    except MissingRanks as error:
        return [members.ranks[rank] for rank in error.ranks]
    return []


def barrier_until(timeout: timedelta, group: dist.ProcessGroup | None = None) -> bool:
    """A timeout wrapper for a barrier (seed page 001, NeMo AutoModel: `_barrier_with_timeout`).

    True if the barrier completed, on all ranks alike; False, with the missing ranks in the log, if the timeout
    occurred first. The wait is on the CPU, beside the process groups of the training: a timeout leaves those as
    they were. What the missing ranks would have contributed is still missing after False.

    Args:
        timeout: Maximum time to wait for the barrier.
        group: Process group whose members wait; None is all ranks.
    """
    missing = missing_after(timeout, group)
    if missing:
        logger.error("barrier: rank(s) %s did not come within %g s", _names(missing), timeout.total_seconds())
    return not missing


def barrier_within(seconds: float, reason: str) -> None:
    """`dist.barrier` with an explicit timeout and a diagnosis (seed page 003: `_barrier_with_timeout`).

    First all ranks report, which names those that are missing and harms no group; then a real barrier
    crosses the network that the training will use.

    Raises:
        BarrierTimeoutError: ranks are missing after `seconds`, or the barrier itself took longer.
        RuntimeError: the barrier failed for another reason; says which.
    """
    if not is_distributed():
        return
    deadline = time.monotonic() + seconds
    missing = missing_after(timedelta(seconds=seconds))
    if missing:
        raise BarrierTimeoutError(
            f"Barrier timed out after {seconds:g}s during {reason}: rank(s) {_names(missing)} did not come. "
            "Look for their first error; if they run, MASTER_ADDR or MASTER_PORT may differ between ranks"
        )
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        work = dist.barrier(async_op=True, device_ids=_device_ids(None))
        done = work is None or work.wait(timeout=left)
    except RuntimeError as error:
        if "timeout" in str(error).lower() or "timed out" in str(error).lower():
            done = False
        else:
            raise RuntimeError(f"Barrier failed during {reason}: {error}") from error
    if done is False:
        raise BarrierTimeoutError(
            f"Barrier timed out after {seconds:g}s during {reason}: all ranks came, but the collective "
            "did not finish. The network between them may be unreachable; see NCCL_SOCKET_IFNAME and "
            "GLOO_SOCKET_IFNAME"
        )


def create_gloo_group() -> dist.ProcessGroup | None:
    """Create a gloo process group of all ranks (seed page 001, NeMo AutoModel: `_create_gloo_group`).

    It waits as long as the run's own collectives do. All ranks must make the call, and may keep the group:
    `monitored_barrier` works on it beside nccl. None without a process group; a failure is raised, as a
    rank that went on without the group would hang the others.
    """
    if not is_distributed():
        return None
    timeout = _get_default_store().timeout  # type: ignore[attr-defined]  # missing in its stub
    group = dist.new_group(backend="gloo", timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def _device_ids(group: dist.ProcessGroup | None) -> list[int] | None:
    if torch.cuda.is_available() and backend_supports_cuda(str(dist.get_backend(group))):
        return [torch.cuda.current_device()]
    return None


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
