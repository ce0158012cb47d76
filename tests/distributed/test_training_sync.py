"""get_sync_ctx and reduce_loss on real ranks; each check is also run on the published behaviour, where it fails."""

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

from components.distributed.gradient_sync import param_groups
from components.distributed.traffic import record_traffic
from components.training import get_sync_ctx, reduce_loss
from tests.harness import run_ranks

SyncContext = Callable[[nn.Module, bool, bool], AbstractContextManager[None]]


def published_sync_ctx(model: nn.Module, is_optim_step: bool, defer: bool) -> AbstractContextManager[None]:
    """What NeMo AutoModel's does: looks at the root's type only, sets FSDP2's flag at once and never puts it back."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_optim_step or not defer)
        return nullcontext()
    if isinstance(model, DistributedDataParallel) and not is_optim_step:
        return model.no_sync()
    return nullcontext()


def published_reduce_loss(losses: list[torch.Tensor], tokens: torch.Tensor, per_token: bool, group: Any) -> Any:
    """What NeMo AutoModel's does, on CPU: float32 sums, an int32 count, and no answer to an empty store."""
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
    """Whether the backward under `sync` reduced gradients; rank r feeds r + 1, so unreduced ones differ by rank."""
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
    """SEED_NOTES 2, get_sync_ctx: sticky; an exception inside leaves the reduction off."""
    model = sharded(rank)
    with pytest.raises(ZeroDivisionError), sync(model, False, True):
        raise ZeroDivisionError
    groups = [group for unit in model.modules() if isinstance(unit, FSDPModule) for group in param_groups(unit)]
    assert groups
    assert all(group.reduce_grads for group in groups)


def deferral_reaches_a_wrapped_model(sync: SyncContext, rank: int) -> None:
    """SEED_NOTES 2, get_sync_ctx: a wrapper (torch.compile's OptimizedModule, any outer module) is not looked into."""
    model = sharded(rank, "wrapped")
    assert not is_reduced(sync, model, rank, last=False)
    assert is_reduced(sync, model, rank, last=True)


def reduce_counts_large_numbers(reduce: Any, rank: int) -> None:
    """SEED_NOTES 2, reduce_loss: int32 overflows; 2^31 + 5 tokens become negative."""
    _, count = reduce([torch.tensor(1.0)], torch.tensor([2**30 + rank]), True, dist.group.WORLD)
    assert count.item() == 2**31 + 1


def reduce_takes_an_empty_store(reduce: Any, rank: int) -> None:
    """SEED_NOTES 2, reduce_loss: a rank without micro-batches raises and hangs its peers."""
    # The published rank 0 waits in vain for rank 1, as long as the group lets it.
    group = dist.new_group(timeout=timedelta(seconds=2)) if reduce is published_reduce_loss else dist.group.WORLD
    losses = [torch.tensor(3.0)] if rank == 0 else []
    loss, count = reduce(losses, torch.tensor([4 if rank == 0 else 0]), True, group)
    assert (loss.item(), count.item()) == (3.0, 4)


def reduce_keeps_small_terms(reduce: Any, rank: int) -> None:
    """SEED_NOTES 2, reduce_loss: sums in float32; 2^24 + 1 is lost."""
    value = torch.tensor(2.0**24 if rank == 0 else 1.0, dtype=torch.float64)
    assert reduce([value], torch.tensor([1]), True, dist.group.WORLD)[0].item() == 2.0**24 + 1


def reduce_names_the_rank_of_a_nan(reduce: Any, rank: int) -> None:
    """SEED_NOTES 2, reduce_loss: a NaN on one rank poisons all without naming it."""
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


def test_ours_holds_where_the_published_fails() -> None:
    def on_rank(rank: int) -> list[str]:
        wrong = []
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
            # A check proves something if the published behaviour fails it on at least one rank.
            everyone: list[bool] = [False] * dist.get_world_size()
            if check is reduce_takes_an_empty_store:
                return_early = fails  # its peer is left hanging in a collective: nothing more runs on this group
                return wrong + ([] if return_early or rank == 0 else [check.__name__])
            dist.all_gather_object(everyone, fails)
            if not any(everyone):
                wrong.append(check.__name__)
        return wrong

    REDUCE_CHECKS.sort(key=lambda check: check is reduce_takes_an_empty_store)  # last: it breaks the group
    assert run_ranks(2, on_rank, timeout=60) == [[], []]


def test_an_unchecked_loss_is_summed_as_it_is() -> None:
    """What the training loop asks of reduce_loss: no exception, no host sync, two numbers in one collective."""
    meta = torch.zeros((), dtype=torch.float64, device="meta")  # on which a host sync raises
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


def test_ddp_defers_and_a_mean_is_a_mean() -> None:
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
