"""The measured bytes that a rank holds during a training step.

State is read from the tensors: the storages of this rank's parameters, gradients and optimizer state, each counted
once. The rest of a step's memory comes from torch's CPU allocator, which reports every allocation and every free.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from components import distributed, models, training
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema.model import ModelConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.parallelism import ParallelismConfig
from components.protocol.role import without_ranks

WARM_UP_TOKENS = 64
"""Row of the step before the measured one; divides into the parts of every mesh."""


@dataclass(frozen=True)
class Load:
    """What each data-parallel rank computes in a step."""

    seq: int
    """Tokens of a row; a micro-batch is one row."""
    micro_batches: int = 1


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank."""

    parameters: int
    """With the working copy of a tied head, where the last pipeline stage keeps one."""
    gradients: int
    """When the optimizer uses them."""
    optimizer: int
    saved: int
    """The most that autograd kept for the backward at once, parameters excepted: the activations."""
    peak: int
    """The most that was allocated at once during the step, all of the above included."""

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


Work = dict[str, tuple[ParallelismConfig, Load, int]]
"""Name of a mesh -> the mesh, what it computes, and its number of ranks."""


def measure_all(cfg: ModelConfig, work: Work) -> dict[str, Usage | str]:
    """Return by name what the rank that holds most held, or why a mesh was refused, from processes of its own."""
    found: dict[str, Usage | str] = {}
    context = get_context("fork")  # a child finds torch imported
    for world in sorted({ranks for _, _, ranks in work.values()}):
        queue = context.SimpleQueue()
        some = {name: each for name, each in work.items() if each[2] == world}
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
        start_processes(_rank, (world, port, cfg, some, queue), nprocs=world, start_method="fork")
        by_rank = [queue.get() for _ in range(world)]
        for name in some:
            told = [each[name] for each in by_rank]
            refused = [each for each in told if isinstance(each, str)]
            # Each figure's own maximum: stages of a pipeline differ.
            found[name] = (
                refused[0] if refused else Usage(*(max(column) for column in zip(*map(astuple, told), strict=True)))
            )
    return found


def _rank(rank: int, world: int, port: int, cfg: ModelConfig, work: Work, queue: Any) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    variables = without_ranks(os.environ) | {name: str(number) for name, number in numbers.items()}
    os.environ.clear()
    os.environ |= variables | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)  # a forked process must not use the threads of the one it came from
    distributed.start_process_group("cpu")
    found: dict[str, Usage | str] = {}
    for name, (parallelism, load, _) in work.items():
        try:
            found[name] = measure(cfg, parallelism, load)
        except ConfigError as error:  # alike on every rank
            found[name] = "; ".join(error.problems)
    queue.put(found)
    distributed.barrier()


def measure(cfg: ModelConfig, parallelism: ParallelismConfig, load: Load) -> Usage:
    """Train two steps of the model on this mesh and return what this rank held in the second.

    Call it on every rank of a process group. Raises ConfigError where the mesh cannot hold the model.
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

    step(min(WARM_UP_TOKENS, load.seq))  # makes the optimizer's state
    parameters = local_bytes(held)
    state = local_bytes(value for values in optimizer.state.values() for value in values.values())
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(local_bytes(each.grad for each in held if each.grad is not None))
    )
    with SavedForBackward(lambda: parameters_in_use(model, head)) as saved, allocations() as changes:
        step(load.seq)
    return Usage(parameters, gradients[0], state, saved.peak, parameters + state + highest(changes))


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of these tensors on this rank, a storage that several share counted once."""
    return sum({id_of(storage): storage.nbytes() for tensor in tensors for storage in storages(tensor)}.values())


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return what a tensor occupies on this rank: of a DTensor, its local part."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = [getattr(tensor, name) for name in names]
    return [storage for part in parts if isinstance(part, torch.Tensor) for storage in storages(part)]


def id_of(storage: torch.UntypedStorage) -> int:
    """Return what tells one storage that is alive from another."""
    return storage._cdata


def parameters_in_use(model: nn.Module, head: nn.Module | None) -> list[torch.Tensor]:
    """Return the parameters as a forward sees them: under FSDP2 those gathered from all ranks, too."""
    modules = [*model.modules(), *([] if head is None else [head])]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


class SavedForBackward:
    """Counts what autograd keeps for the backward, in every forward within the context."""

    def __init__(self, parameters: Callable[[], list[torch.Tensor]]) -> None:
        self.peak = 0
        """Bytes that were kept at once at most, parameters and their views excepted."""
        self._parameters = parameters
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        parameters: set[int] | None = None
        for storage in storages(tensor):
            key = id_of(storage)
            if key in self._kept:
                continue
            if parameters is None:
                parameters = {id_of(each) for parameter in self._parameters() for each in storages(parameter)}
            if key not in parameters:
                self._kept[key] = storage.nbytes()
                weakref.finalize(storage, self._kept.pop, key)
        self.peak = max(self.peak, sum(self._kept.values()))
        return tensor


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Collect the sizes of all allocations and, negative, of all frees of the CPU allocator, in order of time.

    The list is filled at the end. What was there before the context and is freed within is not in it.
    """
    changes: list[int] = []
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        yield changes
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def highest(changes: Iterable[int]) -> int:
    """Return the most that was allocated at once."""
    allocated = most = 0
    for change in changes:
        allocated += change
        most = max(most, allocated)
    return most
