"""Chunks of the loss on GPUs follow the memory of the device; ranks that share the vocabulary use the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components import distributed
from components.config.compute_rules import chunk_logits
from components.config.schema import ParallelismConfig
from components.planning.formulas.memory import rank_memory
from components.training import CrossEntropy
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.objectives.loss_head import _chunk_logits
from tests.harness import run_ranks
from tests.unit.test_planning_time import workload

GB = 1_000_000_000


@pytest.mark.parametrize(("memory", "power"), [(16, 24), (25.2, 25), (42.3, 26), (84.9, 27), (149.9, 28), (206, 28)])
def test_a_chunk_takes_a_share_of_the_memory(memory: float, power: int) -> None:
    assert chunk_logits(memory * GB) == 2**power


def test_the_loss_computes_at_most_a_chunk_of_logits_at_a_time() -> None:
    hidden, weight = torch.randn(40, 8), torch.randn(100, 8)
    largest = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.shape[1:] == (100,):
                largest.append(len(found))
            return found

    losses = []
    for head in (Head(), Head(chunk_logits=1000)):
        largest.clear()
        with Record():
            losses.append(linear_token_loss(hidden, weight, None, Targets(torch.arange(40)), head, CrossEntropy()))
        assert max(largest) == (40 if head.chunk_logits is None else 10)
    torch.testing.assert_close(*losses)


def test_tensor_parallel_ranks_use_the_least_chunk() -> None:
    def on_rank(rank: int) -> list[int | None]:
        memory = (84.9 if rank == 0 else 42.3) * GB
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=int(memory))
        mesh = distributed.build_mesh(ParallelismConfig(dp_shard=1, tp=2), "cpu")
        return [_chunk_logits(torch.device("cuda"), mesh), _chunk_logits(torch.device("cpu"), mesh)]

    assert run_ranks(2, on_rank) == [[2**26, None]] * 2


def test_planned_memory_follows_the_chunk() -> None:
    load = workload("8b", parallelism={"activation_checkpointing": "full"})
    found = []
    for memory in (None, 25.2 * GB, 84.9 * GB):
        terms = rank_memory(replace(load, loss="chunked", device_memory=memory), 0, "cuda").terms
        found.append(sum(each.value for each in terms if each.name == "loss"))
    assert found[0] == found[2] > found[1]
