"""get_sync_ctx and reduce_loss on gloo ranks; each check also runs on the published behavior, which must fail it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from components.distributed.fsdp import param_groups
from components.training import get_sync_ctx, reduce_loss
from components.training.step_cost import record_traffic
from tests.harness import run_ranks

SyncContext = Callable[[nn.Module, bool, bool], AbstractContextManager[None]]


def published_sync_ctx(model: nn.Module, is_optim_step: bool, defer: bool) -> AbstractContextManager[None]:
    """NeMo AutoModel's behavior: checks only the type of the root, sets FSDP2's flag and never resets it."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_optim_step or not defer)
        return nullcontext()
    if isinstance(model, DistributedDataParallel) and not is_optim_step:
        return model.no_sync()
    return nullcontext()


def published_reduce_loss(losses: list[torch.Tensor], tokens: torch.Tensor, per_token: bool, group: Any) -> Any:
    """NeMo AutoModel's behavior on CPU: float32 sums, an int32 count, and an exception for an empty list."""
    loss = torch.stack(losses).float().sum().reshape(1)
    count = tokens.clone().to(torch.int32) if per_token else torch.tensor([len(losses)], dtype=torch.int32)
    if group is not None:
        dist.all_reduce(loss, group=group)
        dist.all_reduce(count, group=group)
    return loss, count


def sharded(rank: int, wrapper: str = "") -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return nn.Sequential(model) if wrapper == "wrapped" else model


def is_reduced(sync: SyncContext, model: nn.Module, rank: int, *, last: bool) -> bool:
    """Whether the backward under `sync` reduced gradients; inputs and unreduced gradients differ by rank."""
    model.zero_grad()
    with sync(model, last, True):
        model(torch.full((1, 4), rank + 1.0, dtype=torch.float64)).sum().backward()
    return any(p.grad is not None for p in model.parameters()) and _grads_agree(model)


def _grads_agree(model: nn.Module) -> bool:
    first = next(model.parameters())
    grad = first.grad.full_tensor() if hasattr(first.grad, "full_tensor") else first.grad
    both = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(both, grad.contiguous())
    return all(torch.equal(both[0], other) for other in both)


def deferral_is_undone_after_an_exception(sync: SyncContext, rank: int) -> None:
    """NeMo AutoModel get_sync_ctx: never resets the flag, so reduction stays off after an exception."""
    model = sharded(rank)
    with pytest.raises(ZeroDivisionError), sync(model, False, True):
        raise ZeroDivisionError
    groups = [group for unit in model.modules() if isinstance(unit, FSDPModule) for group in param_groups(unit)]
    assert groups
    assert all(group.reduce_grads for group in groups)


def deferral_reaches_a_wrapped_model(sync: SyncContext, rank: int) -> None:
    """NeMo AutoModel get_sync_ctx: ignores models inside a wrapper, such as torch.compile's OptimizedModule."""
    model = sharded(rank, "wrapped")
    assert not is_reduced(sync, model, rank, last=False)
    assert is_reduced(sync, model, rank, last=True)


def reduce_counts_large_numbers(reduce: Any, rank: int) -> None:
    """NeMo AutoModel reduce_loss: the int32 count overflows."""
    _, count = reduce([torch.tensor(1.0)], torch.tensor([2**30 + rank]), True, dist.group.WORLD)
    assert count.item() == 2**31 + 1


def reduce_takes_an_empty_store(reduce: Any, rank: int) -> None:
    """NeMo AutoModel reduce_loss: a rank without micro-batches raises, and its peers hang."""
    # With the published behavior, rank 0 waits for rank 1 until the timeout of the group.
    group = dist.new_group(timeout=timedelta(seconds=2)) if reduce is published_reduce_loss else dist.group.WORLD
    losses = [torch.tensor(3.0)] if rank == 0 else []
    loss, count = reduce(losses, torch.tensor([4 if rank == 0 else 0]), True, group)
    assert (loss.item(), count.item()) == (3.0, 4)


def reduce_keeps_small_terms(reduce: Any, rank: int) -> None:
    """NeMo AutoModel reduce_loss: sums in float32, which cannot represent 2^24 + 1."""
    value = torch.tensor(2.0**24 if rank == 0 else 1.0, dtype=torch.float64)
    assert reduce([value], torch.tensor([1]), True, dist.group.WORLD)[0].item() == 2.0**24 + 1


def reduce_names_the_rank_of_a_nan(reduce: Any, rank: int) -> None:
    """NeMo AutoModel reduce_loss: a NaN on one rank propagates without naming the rank."""
    value = torch.tensor(float("nan") if rank == 1 else 1.0)
    with pytest.raises(FloatingPointError, match="rank 1 of 2"):
        reduce([value], torch.tensor([1]), True, dist.group.WORLD)


SYNC_CHECKS = [deferral_is_undone_after_an_exception, deferral_reaches_a_wrapped_model]
REDUCE_CHECKS = [
    reduce_counts_large_numbers,
    reduce_takes_an_empty_store,
    reduce_keeps_small_terms,
    reduce_names_the_rank_of_a_nan,
]


def test_checks_pass_with_ours_and_fail_with_the_published_behavior() -> None:
    def on_rank(rank: int) -> list[str]:
        passed_by_published = []
        for check in SYNC_CHECKS + REDUCE_CHECKS:
            ours, published = (
                (get_sync_ctx, published_sync_ctx) if check in SYNC_CHECKS else (reduce_loss, published_reduce_loss)
            )
            check(ours, rank)
            try:
                check(published, rank)
                fails = False
            except (AssertionError, RuntimeError, pytest.fail.Exception):
                fails = True
            # A check is only meaningful if the published behavior fails it on at least one rank.
            gathered_fails: list[bool] = [False] * dist.get_world_size()
            if check is reduce_takes_an_empty_store:
                return_early = fails  # its peer hangs in a collective, so this group is unusable
                return passed_by_published + ([] if return_early or rank == 0 else [check.__name__])
            dist.all_gather_object(gathered_fails, fails)
            if not any(gathered_fails):
                passed_by_published.append(check.__name__)
        return passed_by_published

    REDUCE_CHECKS.sort(key=lambda check: check is reduce_takes_an_empty_store)  # last: it breaks the group
    assert run_ranks(2, on_rank, timeout=60) == [[], []]


def test_unchecked_loss_is_reduced_without_host_sync() -> None:
    """As used in the training loop: no exception for NaN, no host sync, and one collective for both numbers."""
    meta = torch.zeros((), dtype=torch.float64, device="meta")  # a host sync on a meta tensor raises
    assert reduce_loss([meta], meta, check_finite=False)[0].shape == (1,)
    with pytest.raises((NotImplementedError, RuntimeError)):
        reduce_loss([meta], meta)

    def on_rank(rank: int) -> dict[str, tuple[int, int]]:
        values = [1.0, 2.0, float("nan")][rank], [1.0, 2.0, float("inf")][rank], [1.0, 2.0, 4.0][rank]
        sums = [
            reduce_loss([torch.tensor(value)], torch.tensor([rank]), dp_group=dist.group.WORLD, check_finite=False)
            for value in values
        ]
        assert [count.item() for _, count in sums] == [3, 3, 3]
        assert [str(loss.item()) for loss, _ in sums] == ["nan", "inf", "7.0"]
        with record_traffic() as traffic:
            reduce_loss([torch.tensor(1.0)], torch.tensor(1), dp_group=dist.group.WORLD, check_finite=False)
        return {operation: (volume.calls, volume.bytes) for (_, operation), volume in traffic.volumes.items()}

    assert run_ranks(3, on_rank) == [{"all_reduce": (1, 16)}] * 3


def test_ddp_defers_reduction_and_mean_loss_is_per_token() -> None:
    def on_rank(rank: int) -> list[float]:
        model = sharded(rank, "ddp")
        assert not is_reduced(get_sync_ctx, model, rank, last=False)
        assert is_reduced(get_sync_ctx, model, rank, last=True)
        # 8 tokens of mean 2 on one rank, 2 of mean 5 on the other: 2.6, not the mean of means 3.5
        sums, tokens = ([torch.tensor(16.0)], 8) if rank == 0 else ([torch.tensor(4.0), torch.tensor(6.0)], 2)
        loss, count = reduce_loss(sums, torch.tensor([tokens]), True, dist.group.WORLD)
        batches = reduce_loss(sums, torch.tensor([tokens]), False, dist.group.WORLD)[1]
        return [(loss / count).item(), batches.item()]

    assert run_ranks(2, on_rank) == [[2.6, 3.0], [2.6, 3.0]]
