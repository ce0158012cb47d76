"""Barriers with their own timeouts, which report the ranks that did not arrive."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from components.distributed.process.groups import backend_supports_cuda, find_members, is_distributed, require_member
from components.distributed.process.store_sync import MissingRanks

logger = logging.getLogger(__name__)


class BarrierTimeoutError(RuntimeError):
    """Timeout of a barrier; the message lists the missing ranks."""


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks in the group, for at most the group's timeout (OLMo-core, distributed/utils.py).

    A no-op without a process group. Raises NotInGroupError for a process outside `group`.
    """
    if is_distributed():
        require_member(group)
        dist.barrier(group, device_ids=_device_ids(group))


def missing_after(timeout: timedelta, group: dist.ProcessGroup | None = None) -> list[int]:
    """Wait for all members of `group`, and return the global ranks that did not arrive within `timeout`.

    All ranks, including late ones, get the same result. The wait goes through the store, so a timeout leaves every
    process group usable.
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
    """Wait for all ranks, and return whether they arrived within `timeout`.

    `_barrier_with_timeout` of NeMo AutoModel (nemo_automodel/components/distributed/utils.py). The result is the same
    on all ranks; False logs the missing ranks. The wait goes through the store, so a timeout leaves the process groups
    usable. After False the work of the missing ranks is not done: a caller must not rely on it.

    Args:
        timeout: Maximum time to wait.
        group: Process group whose members wait; None: all ranks.
    """
    missing = missing_after(timeout, group)
    if missing:
        logger.error("barrier: rank(s) %s did not arrive within %g s", _names(missing), timeout.total_seconds())
    return not missing


def barrier_within(seconds: float, reason: str) -> None:
    """Run `dist.barrier` with an explicit timeout and a diagnosis.

    `_barrier_with_timeout` of KempnerForge (distributed/setup.py). All ranks first arrive through the store, which
    finds missing ranks without breaking a process group. The barrier that follows tests the network of the training.

    Raises:
        BarrierTimeoutError: Ranks are missing after `seconds`, or the barrier itself took longer.
        RuntimeError: The barrier failed for another reason, which the message states.
    """
    if not is_distributed():
        return
    deadline = time.monotonic() + seconds
    missing = missing_after(timedelta(seconds=seconds))
    if missing:
        raise BarrierTimeoutError(
            f"Barrier timed out after {seconds:g}s during {reason}: rank(s) {_names(missing)} did not arrive. "
            "Look for their first error; if they run, check that MASTER_ADDR and MASTER_PORT are the same on all ranks"
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
            f"Barrier timed out after {seconds:g}s during {reason}: all ranks arrived, but the collective "
            "did not finish. Check the network between the nodes, and NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )


def create_gloo_group() -> dist.ProcessGroup | None:
    """Create a gloo process group of all ranks, for instance for `monitored_barrier` in a run on nccl.

    `_create_gloo_group` of NeMo AutoModel (nemo_automodel/components/distributed/utils.py). A collective: all ranks
    must call it. The group has the timeout of the default group's store. Return None without a process group. A failure
    raises instead of returning None, since a rank without the group would hang the others.
    """
    if not is_distributed():
        return None
    timeout = _get_default_store().timeout  # type: ignore[attr-defined]  # missing in its stub
    group = dist.new_group(backend="gloo", timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def _device_ids(group: dist.ProcessGroup | None) -> list[int] | None:
    """Return this process's CUDA device for `dist.barrier`, which guesses a device if it is the first collective."""
    if torch.cuda.is_available() and backend_supports_cuda(str(dist.get_backend(group))):
        return [torch.cuda.current_device()]
    return None


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
