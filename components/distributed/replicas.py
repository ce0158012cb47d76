"""Callables over a parallelized model: for training (the model, DDP or a pipeline), and for generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.distributed.context_parallel import unsharded_attention
from components.distributed.mesh import Mesh
from components.distributed.parallelizer import Layout
from components.distributed.pipeline.schedule import Pipeline


def wrap_replicas(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig, layout: Layout) -> nn.Module | Pipeline:
    """Return the callable for training: a Pipeline under pp, DDP around the loaded model, or the model itself.

    DDP's gradients are SUMMED over the replicas, like FSDP2's: the training step divides once.
    """
    if layout.stages is not None:
        return Pipeline(model, layout.stages, mesh["pp"], parallelism.pp_schedule)
    if parallelism.strategy != Strategy.ddp or mesh.size("dp_replicate") == 1:
        return model
    group = mesh["dp_replicate"].get_group()
    replica = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    replica.register_comm_hook(group, _sum_gradients)
    return replica


@dataclass(frozen=True, slots=True)
class UnshardedForward:
    """A forward for generation, called like a Hugging Face model with the same unsharded sequences on every rank."""

    call: Callable[..., Any]
    multiple: int
    """Sequences are padded on the right to a multiple of this many tokens."""
    keeps_cache: bool
    """Whether the forward supports a KV cache."""


@contextmanager
def unsharded_rows(
    replica: nn.Module | Pipeline, mesh: Mesh, parallelism: ParallelismConfig
) -> Iterator[UnshardedForward]:
    """Yield a forward over unsharded sequences for the result of `wrap_replicas`; valid within the context.

    Under cp every rank runs complete rows, with a cache of keys and values. There is no cache under pp, whose schedule
    runs complete rows through the stages, and with sequence_parallel, whose shards of one new token would be empty.
    """
    multiple = mesh.size("tp") if parallelism.sequence_parallel else 1
    if isinstance(replica, Pipeline):
        with unsharded_attention(replica.module):
            yield UnshardedForward(replica.logits, multiple, keeps_cache=False)
        return
    model = replica.module if isinstance(replica, DistributedDataParallel) else replica
    with unsharded_attention(model):
        yield UnshardedForward(model, multiple, keeps_cache=multiple == 1)


def _sum_gradients(group, bucket):
    """DDP communication hook: sum a bucket of gradients over the replicas, 16-bit ones in float32."""
    # No annotations: DDP compares a hook's annotations with classes, and postponed ones are strings.
    gradients = bucket.buffer()
    summand = gradients.float() if gradients.dtype.itemsize == 2 else gradients
    work = torch.distributed.all_reduce(summand, group=group, async_op=True)
    return work.get_future().then(lambda _: gradients.copy_(summand))  # a dry run's futures have no value
