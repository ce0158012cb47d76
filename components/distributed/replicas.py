"""What training calls: the laid-out model itself, DDP around it, or a pipeline; and how each takes whole rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.distributed.context_parallel import whole_rows_attention
from components.distributed.mesh import Mesh
from components.distributed.parallelizer import Layout
from components.distributed.pipeline.schedule import Pipeline


def wrap_replicas(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig, layout: Layout) -> nn.Module | Pipeline:
    """Return what training calls: a pipeline, DDP around a loaded model, the model itself for every other strategy.

    DDP's gradients are SUMMED over the replicas, like FSDP2's here: the training step divides, once.
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
class WholeRows:
    """A forward that every rank calls with the same whole rows, for generation: like a Hugging Face model's."""

    call: Callable[..., Any]
    multiple: int
    """Rows are padded on the right to a multiple of this many tokens."""
    keeps_cache: bool
    """Whether keys and values of earlier tokens may be kept."""


@contextmanager
def whole_rows(replica: nn.Module | Pipeline, mesh: Mesh, parallelism: ParallelismConfig) -> Iterator[WholeRows]:
    """Within the context the model that `wrap_replicas` returned takes whole rows on every rank."""
    multiple = mesh.size("tp") if parallelism.sequence_parallel else 1
    if isinstance(replica, Pipeline):
        with whole_rows_attention(replica.module):
            yield WholeRows(replica.logits, multiple, keeps_cache=False)
        return
    model = replica.module if isinstance(replica, DistributedDataParallel) else replica
    with whole_rows_attention(model):
        yield WholeRows(model, multiple, keeps_cache=multiple == 1)


def _sum_gradients(group, bucket):
    # DDP compares a hook's annotations with its own classes and does not know postponed ones: none here.
    summed = bucket.buffer()
    exact = summed.float() if summed.dtype.itemsize == 2 else summed  # sums of 16 bits lose what is small
    work = torch.distributed.all_reduce(exact, group=group, async_op=True)
    return work.get_future().then(lambda future: summed.copy_(future.value()[0]))
