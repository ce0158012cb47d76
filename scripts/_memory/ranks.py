"""Measurement of a rank's memory during a training step.

Parameters, gradients and optimizer state are measured by the sizes of their storages on this rank, each counted once.
The peak of the step comes from torch's profiler, which records every allocation and free of the CPU allocator.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch.multiprocessing import start_processes

from components import distributed, models, training
from components.batch import Batch
from components.config.schema.model import ModelConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.parallelism import ParallelismConfig
from components.planning.fake_rank import SavedForBackward, local_bytes, parameters_in_use
from components.protocol.errors import ConfigError
from components.protocol.processes import reserve_loopback_port, without_ranks

WARM_UP_TOKENS = 64
"""Tokens per row of the warm-up step; like --seq, it must be divisible by 2 * cp."""


@dataclass(frozen=True)
class Load:
    """Batch of each data-parallel rank in a step."""

    seq: int
    """Tokens per row; a micro-batch is one row."""
    micro_batches: int = 1


@dataclass(frozen=True)
class Usage:
    """Memory of one rank, in bytes."""

    parameters: int
    """Including the working copy of a tied head on the last pipeline stage."""
    gradients: int
    """At the time of the optimizer step."""
    optimizer: int
    """Optimizer state."""
    saved: int
    """Peak of the tensors that autograd saves for the backward (activations), without parameters."""
    peak: int
    """Peak of all memory allocated during the step, including all of the above."""

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


Work = dict[str, tuple[ParallelismConfig, Load, int]]
"""Name of a mesh -> its config, the batch of each data-parallel rank, and the number of ranks."""


def measure_all(cfg: ModelConfig, work: Work) -> dict[str, Usage | str]:
    """Start processes for each mesh; return by name the maximum of each figure over the ranks, or the config error."""
    results: dict[str, Usage | str] = {}
    context = get_context("fork")  # children inherit the imported torch
    for world in sorted({ranks for _, _, ranks in work.values()}):
        queue = context.SimpleQueue()
        selected = {name: each for name, each in work.items() if each[2] == world}
        with reserve_loopback_port() as reserved:
            port = reserved.getsockname()[1]
            start_processes(_rank, (world, port, cfg, selected, queue), nprocs=world, start_method="fork")
        by_rank = [queue.get() for _ in range(world)]
        for name in selected:
            usages = [each[name] for each in by_rank]
            errors = [usage for usage in usages if isinstance(usage, str)]
            # The maximum of each figure may come from a different rank: pipeline stages differ.
            results[name] = (
                errors[0] if errors else Usage(*(max(column) for column in zip(*map(astuple, usages), strict=True)))
            )
    return results


def _rank(rank: int, world: int, port: int, cfg: ModelConfig, work: Work, queue: Any) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    variables = without_ranks(os.environ) | {name: str(number) for name, number in numbers.items()}
    os.environ.clear()
    os.environ |= variables | {"MASTER_ADDR": "127.0.0.1"}
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of collectives that a later torch replaces
    torch.set_num_threads(1)  # the threads of the parent's OpenMP pool do not exist after a fork: using it would hang
    distributed.start_process_group("cpu")
    results: dict[str, Usage | str] = {}
    for name, (parallelism, load, _) in work.items():
        try:
            results[name] = measure(cfg, parallelism, load)
        except ConfigError as error:  # raised on all ranks alike
            results[name] = "; ".join(error.problems)
    queue.put(results)
    distributed.barrier()


def measure(cfg: ModelConfig, parallelism: ParallelismConfig, load: Load) -> Usage:
    """Train two steps of the model on a mesh and return the memory of this rank in the second; a collective.

    Raises ConfigError if the model does not fit the mesh.
    """
    mesh = distributed.build_mesh(parallelism, "cpu")
    model = models.build_on_meta(cfg)
    layout = distributed.parallelize(model, mesh, parallelism, torch.float32)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, seed=0)
    replica = distributed.wrap_replicas(model, mesh, parallelism, layout)
    optimizer = training.build_optimizer(model, AdamWConfig())
    settings = training.StepSettings(device=torch.device("cpu"), mesh=mesh)
    head = layout.stages.tied_head if layout.stages else None
    held = [*model.parameters(), *(head.parameters() if head is not None else ())]

    def step(seq: int) -> None:
        generator = torch.Generator().manual_seed(mesh.rank("dp"))
        rows = torch.randint(model.config.vocab_size, (load.micro_batches, 1, seq), generator=generator)
        training.train_step(
            training.Prepared(model, settings, replica), [Batch.from_labels(row, row) for row in rows], optimizer
        )

    step(min(WARM_UP_TOKENS, load.seq))  # allocates the optimizer state
    parameters = local_bytes(held)
    state = local_bytes(value for values in optimizer.state.values() for value in values.values())
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(local_bytes(each.grad for each in held if each.grad is not None))
    )
    with SavedForBackward(lambda: parameters_in_use(model, head)) as saved, allocations() as changes:
        step(load.seq)
    return Usage(parameters, gradients[0], state, saved.peak, parameters + state + highest(changes))


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Yield a list that is filled at exit: the bytes of each CPU allocation (positive) and free (negative), in order.

    Frees of memory that was allocated before the context are not recorded.
    """
    changes: list[int] = []
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        yield changes
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def highest(changes: Iterable[int]) -> int:
    """Return the peak of the running sum of `changes`, in bytes."""
    allocated = peak = 0
    for change in changes:
        allocated += change
        peak = max(peak, allocated)
    return peak
