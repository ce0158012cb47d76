"""Decoder layers of a model: finding and compiling them; trained parameters; and copies without memory.

Under pipeline parallelism, placeholders without parameters replace the layers of other stages. They keep their index in
the list and are left unchanged.

Tensor parallelism and FSDP replace a model's parameters and class. A copy of the model as transformers builds it still
provides the original names, global shapes, initialization rules and buffer values.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import struct
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from components.config.schema.model import DOCUMENTS
from components.config.schema.training import TrainingConfig
from components.json_collectives import all_gather_json
from components.models.anatomy import Anatomy, ParameterCounts, kept_in_float32, read_anatomy, transformers_class
from components.models.lora import quantized_layers
from components.models.weights.shards import local_part
from components.models.weights.weight_sources import tied_names
from components.protocol.errors import raise_all
from components.torch_kernels import cast_by_autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_GRAPH_LIMIT = 64
"""Recompile limit for all decoder layers together; torch's default of 8 is too low for Gemma 3 with adapters."""
_GRAPH_LIMIT_BY_LENGTH = 1024
"""Recompile limit if each row length is compiled separately."""
_WRITING_SECONDS = 2.0
"""A file modified within this time may still be being written."""
_NORM = re.compile("Norm(?!al)")
"""Matches the class name of a norm; not that of a NormalizedLinear."""


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count the parameters of the unsharded model and of this rank, on any mesh. A collective: call it on all ranks.

    Ranks exchange parameter names, so that the counts include other pipeline stages.
    """
    packed = {f"{name}.weight": each.in_features * each.out_features for name, each in quantized_layers(model).items()}
    local = {
        name: (packed.get(name, parameter.numel()), parameter.requires_grad, name in packed)
        for name, parameter in model.named_parameters()
    }
    by_name = {name: counts for each in all_gather_json(local) for name, counts in each.items()}
    shards = [local_part(parameter) for parameter in model.parameters()]
    return ParameterCounts(
        total=sum(size for size, _, _ in by_name.values()),
        trainable=sum(size for size, trainable, _ in by_name.values() if trainable),
        packed=sum(size for size, _, is_packed in by_name.values() if is_packed),
        local_bytes=sum(shard.numel() * shard.element_size() for shard in shards),
    )


def select_trained(model: nn.Module, training: TrainingConfig, groups: Sequence[dict[str, Any]] = ()) -> None:
    """Freeze what training.trainable and training.freeze leave out, in place.

    Call it before the model is sharded, when every rank has all names. A tied parameter has its first name only.

    Args:
        groups: optimizer.groups, each of which must match a trained parameter that no earlier one matches.

    Raises ConfigError for a regular expression that matches no parameter, or if nothing is left to train.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = _found(trained, training.trainable or [""])
    problems = _unmatched(model, "training.trainable", training.trainable, trained)
    problems += _unmatched(model, "training.freeze", training.freeze, kept)
    frozen = set(_found(kept, training.freeze))
    kept = [name for name in kept if name not in frozen]
    if trained and not kept and not problems:
        problems.append(
            f"training.freeze={training.freeze}: freezes all that training.trainable={training.trainable} selects, so "
            "that nothing is trained; freeze fewer"
        )
    rest = kept
    for number, match in enumerate(str(group["match"]) for group in groups):
        problems += _unmatched(model, f"optimizer.groups[{number}].match", [match], rest) if not problems else []
        rest = [name for name in rest if not re.search(match, name)]
    raise_all(problems)
    for name in trained.keys() - set(kept):
        trained[name].requires_grad_(False)


def _found(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _unmatched(model: nn.Module, key: str, patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a problem for each regular expression that is found in none of the names."""
    problems = []
    for pattern in patterns:
        if _found(names, [pattern]):
            continue
        others = [f"{name} is tied to {first}, whose name counts" for name, first in tied_names(model).items()]
        others += [f"{name} is frozen, or matched before" for name, _ in model.named_parameters()]
        reason = next(iter(_found(others, [pattern])), "no trained parameter has such a name")
        kinds = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names)
        problems.append(f"{key}={pattern}: {reason}; match some of {', '.join(kinds)}")
    return problems


def decoder_layers(model: nn.Module, anatomy: Anatomy | None = None) -> list[nn.Module]:
    """Return the decoder layers in order, including placeholders of other pipeline stages.

    Args:
        anatomy: Structure of the model, read before it was parallelized; None: read it now.

    Raises:
        NotImplementedError: The model has no ModuleList of decoder layers.
    """
    layers = list((anatomy or read_anatomy(model)).decoder_layers(model).values())
    if not layers:
        raise NotImplementedError(f"{type(model).__name__} has no list of decoder layers")
    return layers


def vector_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are vectors or stacks of vectors: biases, weights of norms, and all of one dim.

    Stacked ones have as many dims as matrices: the biases of all experts, the norms of all heads.
    """
    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() < 2 or name.endswith("bias") or _NORM.search(type(module).__name__)
    }


def has_parameters(layer: nn.Module) -> bool:
    """Return whether a layer is real; placeholders of other pipeline stages have no parameters."""
    return any(True for _ in layer.parameters())


def meta_copy(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the copy on the meta device, with the dtypes of a model loaded in `dtype` (None: the model's dtype)."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        copied: PreTrainedModel = transformers_class(model)._from_config(config, dtype=dtype or config.dtype)
    return keep_float32(copied)


def keep_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Set the tensors to float32, in place, that transformers keeps in float32 when it loads weights in 16 bits.

    They are listed by the class, such as biases that balance experts, which 16 bits would round to another choice of
    experts. Constructors create them in the dtype of the model.
    """
    if (kept := kept_in_float32(model, model.dtype)) is None:
        return model
    for name, parameter in model.named_parameters():
        if kept.search(name):
            parameter.data = parameter.data.float()
    for name, buffer in list(model.named_buffers()):
        if kept.search(name) and buffer.is_floating_point():
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._buffers[attribute] = buffer.float()
    return model


def cast_experts() -> None:
    """Let transformers' grouped product of experts compute in autocast's dtype, as other products do. Once per process.

    torch's operator knows no autocast (https://github.com/pytorch/pytorch/issues/174763): in float32 it would be slow,
    wait for the host on a GPU, and round otherwise than under FSDP2.
    """
    from transformers.integrations import moe

    if not isinstance(moe._grouped_mm, partial):
        moe._grouped_mm = partial(_product_by_autocast, moe._grouped_mm)


def _product_by_autocast(
    product: Callable[..., torch.Tensor], tokens: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    return product(*cast_by_autocast(tokens, weight), offs=offs)


def copy_with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Build the copy with parameters on the meta device, and buffers on the CPU as the constructor computes them."""
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        return transformers_class(model)._from_config(copy.deepcopy(model.config))


class _EmptyOnMeta(TorchFunctionMode):
    """Function mode that redirects `torch.empty`, which allocates parameters, to the meta device.

    Constructors compute buffers with other functions, so buffers keep their values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


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
