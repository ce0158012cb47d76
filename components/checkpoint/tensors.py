"""Model and optimizer state as named tensors, and their way to and from safetensors files.

Names and global shapes are all that counts: `model/<parameter>`, `optimizer/<quantity>/<parameter>` for what has the
parameter's shape, `counter/<quantity>/<parameter>` for numbers such as AdamW's step. So any mesh reads what any mesh
wrote. Ranks may hold different names (pipeline stages): what has to be known of all is exchanged, and each rank reads
what it holds. torch.distributed.checkpoint moves the blocks (planners.py); its Hugging Face storage writes
safetensors and nothing else, where its own would leave a pickle.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from components.checkpoint.checkpoint_error import CheckpointError
from components.checkpoint.manifest import FileRecord
from components.checkpoint.planners import BlockWriter, LoadBlocks, SaveBlocks, Tensors, held_of
from components.config.errors import ConfigError
from components.exchange import all_gather_json
from components.models.lora import adapted_layers

T = TypeVar("T")

MODEL = "model/"
OPTIMIZER = "optimizer/"
COUNTER = "counter/"
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
"""One optimizer, or several by name, each with parameters of its own."""
FILE_BYTES = 512 * 1024**2
"""About the size of a rank's files: each is put together in host memory, in twice its size."""


def over_all_ranks(mine: dict[str, T], group: dist.ProcessGroup | None = None) -> dict[str, T]:
    """Return the entries of all ranks, as JSON; of a name that several have, the first rank's. A collective."""
    union: dict[str, T] = {}
    for held in all_gather_json(mine, group):
        for name, entry in held.items():
            union.setdefault(name, entry)
    return union


def model_tensors(model: nn.Module) -> Tensors:
    """Return parameters and persistent buffers, tied ones once, as `model/<name>`; of a model with adapters, these."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    adapted = bool(adapted_layers(model))
    seen: set[int] = set()
    tensors: Tensors = {}
    # Asking for the state dict makes FSDP put parameters back into shards, which the optimizer knows them as.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not adapted):
            seen.add(id(tensor))
            tensors[MODEL + name] = tensor
    return tensors


def list_optimizers(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run, whether it has one or several by name."""
    return list(optimizers.values()) if isinstance(optimizers, Mapping) else [optimizers]


def optimizer_tensors(optimizers: Optimizers, parameters: Tensors) -> Tensors:
    """Return the optimizers' state of each parameter under its name; a parameter belongs to one optimizer.

    Raises:
        NotImplementedError: State that has neither the parameter's shape nor none.
    """
    tensors: Tensors = {}
    for optimizer in list_optimizers(optimizers):
        tensors |= _tensors_of(optimizer, parameters)
    return tensors


def _tensors_of(optimizer: torch.optim.Optimizer, parameters: Tensors) -> Tensors:
    tensors: Tensors = {}
    optimizer.state_dict()  # runs the hooks that complete the state: of a skipped step, some is put back late
    for full_name, parameter in parameters.items():
        name = full_name.removeprefix(MODEL)
        for quantity, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if value.ndim == 0:
                tensors[f"{COUNTER}{quantity}/{name}"] = value
            elif value.shape == parameter.shape:
                tensors[f"{OPTIMIZER}{quantity}/{name}"] = value
            else:
                raise NotImplementedError(
                    f"{type(optimizer).__name__}: {quantity} of {name} is {tuple(value.shape)} where the parameter is "
                    f"{tuple(parameter.shape)}; such state cannot be saved yet"
                )
    return tensors


def write_tensors(folder: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> dict[str, FileRecord]:
    """Write every rank's blocks into `folder`, replicas once, and return what this rank wrote; a collective of `group`.

    Raises NotImplementedError for a layout that is none of blocks.
    """
    # Rank 0's mapping is the one that counts, for the names of all ranks.
    mine = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    everyone = all_gather_json(mine, group)
    holders = Counter(name for held in everyone for name in held)
    sizes = {name: size // holders[name] for held in everyone for name, size in held.items()}
    writer = BlockWriter(folder, _files_of_bounded_size(sizes))
    with _translated():
        dcp.save({}, storage_writer=writer, planner=SaveBlocks(held_of(tensors)), process_group=group)
    return writer.records


def read_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return what is stored under each name: its type and global shape."""
    described = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: each for name, each in described.items() if isinstance(each, TensorStorageMetadata)}


def read_tensors(folder: Path, tensors: Tensors) -> None:
    """Fill this rank's parts of `tensors` in place from the files of `folder`; a collective."""
    with _translated(), torch.no_grad():
        dcp.load({}, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), planner=LoadBlocks(held_of(tensors)))


def make_optimizer_state(
    optimizers: Optimizers, parameters: Tensors, stored: dict[str, TensorStorageMetadata]
) -> Tensors:
    """Give the optimizers room for what is stored of this rank's parameters, without taking a step; a collective.

    Returns the state by stored name.

    Raises:
        ConfigError: On every rank: there is state of a parameter that no rank's optimizer trains.
    """
    owners = {
        id(parameter): (optimizer, group)
        for optimizer in list_optimizers(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained_anywhere = over_all_ranks({name: True for name, each in parameters.items() if id(each) in owners})
    for optimizer in list_optimizers(optimizers):
        optimizer.state.clear()
    for key, described in stored.items():
        kind, _, rest = key.partition("/")
        quantity, _, name = rest.partition("/")
        if f"{kind}/" not in (OPTIMIZER, COUNTER):
            continue
        if MODEL + name not in trained_anywhere:
            raise ConfigError(
                f"the checkpoint holds optimizer state of {name}, which this run does not train; set run.resume=never"
            )
        parameter = parameters.get(MODEL + name)
        if parameter is None or id(parameter) not in owners:
            continue
        optimizer, group = owners[id(parameter)]
        dtype = described.properties.dtype
        if f"{kind}/" == OPTIMIZER:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # Where torch.optim keeps it: on the device only for kernels that read it there.
            on_device = group.get("fused") or group.get("capturable")
            value = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        optimizer.state[parameter][quantity] = value
    return optimizer_tensors(optimizers, parameters)


def _files_of_bounded_size(sizes: dict[str, int]) -> dict[str, int]:
    """Tensor -> number of the file it goes to, from 1 on."""
    numbers: dict[str, int] = {}
    total = 0
    for name, size in sizes.items():
        numbers[name] = 1 + total // FILE_BYTES
        total += size
    return numbers


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """torch.distributed.checkpoint's errors, which every rank has, in one line; its warnings left out.

    A single process is a fine place for a checkpoint, whatever it warns.
    """
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():  # filters belong to all threads: they are left alone where there is no need
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            told = [f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items()]
            raise CheckpointError("; ".join(told)) from error
