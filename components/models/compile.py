"""Compilation of decoder layers, and cleanup of torch's compile cache: files that a killed compiler left truncated."""

from __future__ import annotations

import logging
import os
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from components.config.schema.model import DOCUMENTS
from components.models.anatomy import Anatomy, read_anatomy
from components.models.layers import decoder_layers, has_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_GRAPH_LIMIT = 64
"""Recompile limit for all decoder layers together; torch's default of 8 is too low for Gemma 3 with adapters."""
_GRAPH_LIMIT_BY_LENGTH = 1024
"""Recompile limit if each row length is compiled separately."""
_WRITING_SECONDS = 2.0
"""A file modified within this time may still be being written."""


def compile_layers(
    model: PreTrainedModel,
    fullgraph: bool = True,
    backend: str | Callable = "inductor",
    anatomy: Anatomy | None = None,
    async_tp: ProcessGroup | None = None,
) -> None:
    """Compile the forward of each decoder layer in place; names and classes do not change.

    Only the layer's forward is compiled. Hooks around it, such as FSDP's, stay outside, and so does the recomputation
    of `checkpoint_activations`, which may be applied before or after. If a forward inside a layer disables the compiler
    (expert parallelism, attention over gathered keys), the layer is compiled with a graph break around it.

    Layers of one class share their graphs and torch's recompile limit, beyond which `fullgraph` raises. This function
    increases the limit, because variants multiply: evaluation and training, frozen inputs under adapters, rows shorter
    and longer than a window and, under tensor parallelism, each row length.

    Args:
        async_tp: Process group of sequence parallelism, whose collectives overlap with the matmuls beside them (of 8
            per layer, all but the backward's 2 reduce-scatters); None: they do not.
    """
    any_length = not _is_tp_sharded(model)
    limit = _GRAPH_LIMIT if any_length else _GRAPH_LIMIT_BY_LENGTH
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    if backend == "inductor":
        remove_truncated_libraries()
    from transformers import AttentionInterface

    options: dict[str, Any] = {}
    if async_tp is not None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            # Deprecated as unnecessary, but the compiler of torch 2.13 skips groups that are not registered.
            enable_symm_mem_for_group(async_tp.group_name)
        options = {"options": {"_micro_pipeline_tp": True}}
    attention = AttentionInterface().get(model.config._attn_implementation)
    mixes = bool((anatomy or read_anatomy(model)).mixers)  # of layers that keep documents apart outside of the graph
    for layer in filter(has_parameters, decoder_layers(model, anatomy)):
        forward = layer.forward
        forwards = [attention, *(module.forward for module in layer.modules())]
        # torch.compiler.disable marks a function with this attribute; a graph break is an error under fullgraph.
        without_breaks = fullgraph and not any(hasattr(each, "_torchdynamo_disable") for each in forwards)
        without_breaks = without_breaks and not mixes
        checkpointed = forward if isinstance(forward, partial) and forward.func is checkpoint else None
        inner = checkpointed.args[0] if checkpointed else forward
        compiled = torch.compile(
            inner, fullgraph=without_breaks, backend=backend, dynamic=None if any_length else False, **options
        )
        if any_length:
            compiled = partial(_call_compiled, compiled)
        layer.forward = partial(checkpoint, compiled, **checkpointed.keywords) if checkpointed else compiled


def _is_tp_sharded(model: nn.Module) -> bool:
    """Return whether parameters are DTensors of a tp axis, which torch 2.13 cannot compile with a dynamic seq dim."""
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)


def _call_compiled(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled layer with its sequence dims marked dynamic, unless rows are packed (one length).

    Without the marks, torch compiles a static graph for the first length, and a dynamic one only at the second.
    """
    if kwargs.get(DOCUMENTS) is None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                for dim in _sequence_dims(leaf):
                    torch._dynamo.maybe_mark_dynamic(leaf, dim)
    return compiled(*args, **kwargs)


def _sequence_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sequence dims of a layer's input, by its number of dims.

    Inputs are position ids (batch, seq), hidden states and rotary embeddings (batch, seq, width), and masks
    (batch, 1 or heads, seq, seq). Dims of size 1 are skipped, because torch specializes on them.
    """
    dims = {2: (1,), 3: (1,), 4: (2, 3)}.get(tensor.dim(), ())
    return tuple(dim for dim in dims if tensor.shape[dim] > 1)


def remove_truncated_libraries() -> list[Path]:
    """Delete truncated files from the cache of torch.compile's C++ backend, and return their paths.

    The linker writes in place, and torch assumes that any existing file is complete. A process killed while compiling
    therefore leaves a file that makes every later run fail with "ImportError: file too short".
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    removed = [path for path in _libraries(Path(cache_dir())) if _remove_truncated(path, Path(get_lock_dir()))]
    if removed:
        logger.warning("removed %d truncated files from torch's compile cache, such as %s", len(removed), removed[0])
    return removed


def _is_truncated(path: Path) -> bool:
    """Return whether a file is shorter than its ELF header states; compilers write the section table last."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if header[:4] != b"\x7fELF"[: len(header[:4])]:
        return False  # not ELF: another platform
    if len(header) < 64:
        return True
    (offset,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<HH", header, 58)
    return offset == 0 or offset + entry_size * entries > size


def _libraries(cache: Path) -> Iterator[Path]:
    for suffix in ("so", "o"):
        yield from cache.glob(f"*/*.{suffix}")


def _remove_truncated(path: Path, locks: Path) -> bool:
    """Delete a file if it is truncated and no process is writing it; return whether it was deleted.

    While it writes a library, torch holds the lock named after the library's key. Object files have no lock, so their
    age decides.
    """
    from filelock import FileLock, Timeout

    try:
        if not _is_truncated(path) or time.time() - path.stat().st_mtime < _WRITING_SECONDS:
            return False
        with FileLock(locks / f"{path.name.partition('.')[0]}.lock", timeout=0):
            if not _is_truncated(path):  # its writer finished in the meantime
                return False
            path.unlink()
            return True
    except (FileNotFoundError, Timeout):  # another rank deleted it, or a compiler holds the lock
        return False
