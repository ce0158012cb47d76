"""Decoder layers of a model: finding, checkpointing and compiling them; and parameter counts.

Under pipeline parallelism, placeholders without parameters replace the layers of other stages. They keep their index in
the list and are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from components.config.schema.model import DOCUMENTS
from components.config.schema.parallelism import ActivationCheckpointing
from components.exchange import all_gather_json
from components.models.activations import selective_contexts, wrap_compiled_regions
from components.models.anatomy import Anatomy, read_anatomy
from components.models.compile_cache import remove_truncated_libraries
from components.models.lora import quantized_layers
from components.models.weights.shards import local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRAPH_LIMIT = 64
"""Recompile limit for all decoder layers together; torch's default of 8 is too low for Gemma 3 with adapters."""
GRAPH_LIMIT_BY_LENGTH = 1024
"""Recompile limit if each row length is compiled separately."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameter counts of a model; a tied parameter counts once."""

    total: int
    """Elements of all parameters of the unsharded model."""
    trainable: int
    """Elements of trainable parameters."""
    local_bytes: int
    """Bytes of this rank's shards."""
    packed: int = 0
    """Elements of parameters stored in 4 bits."""

    def __str__(self) -> str:
        if self.trainable == self.total:
            return f"{self.total:,} parameters"
        trained = f"{self.total:,} parameters, {self.trainable:,} of them trained ({self.trainable / self.total:.2%})"
        return f"{trained}, {self.packed:,} frozen in NF4" if self.packed else trained


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


def compile_layers(
    model: PreTrainedModel,
    fullgraph: bool = True,
    backend: str | Callable = "inductor",
    anatomy: Anatomy | None = None,
) -> None:
    """Compile the forward of each decoder layer in place; names and classes do not change.

    Only the layer's forward is compiled. Hooks around it, such as FSDP's, stay outside, and so does the recomputation
    of `checkpoint_activations`, which may be applied before or after. If a forward inside a layer disables the compiler
    (expert parallelism, attention over gathered keys), the layer is compiled with a graph break around it.

    Layers of one class share their graphs and torch's recompile limit, beyond which `fullgraph` raises. This function
    increases the limit, because variants multiply: evaluation and training, frozen inputs under adapters, rows shorter
    and longer than a window and, under tensor parallelism, each row length.
    """
    any_length = not _is_tp_sharded(model)
    limit = GRAPH_LIMIT if any_length else GRAPH_LIMIT_BY_LENGTH
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    if backend == "inductor":
        remove_truncated_libraries()
    from transformers import AttentionInterface

    attention = AttentionInterface().get(model.config._attn_implementation)
    for layer in filter(_has_parameters, decoder_layers(model, anatomy)):
        forward = layer.forward
        forwards = [attention, *(module.forward for module in layer.modules())]
        # torch.compiler.disable marks a function with this attribute; a graph break is an error under fullgraph.
        without_breaks = fullgraph and not any(hasattr(each, "_torchdynamo_disable") for each in forwards)
        checkpointed = forward if isinstance(forward, partial) and forward.func is checkpoint else None
        inner = checkpointed.args[0] if checkpointed else forward
        compiled = torch.compile(
            inner, fullgraph=without_breaks, backend=backend, dynamic=None if any_length else False
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
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor):
                for dim in _sequence_dims(each):
                    torch._dynamo.maybe_mark_dynamic(each, dim)
    return compiled(*args, **kwargs)


def _sequence_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sequence dims of a layer's input, by its number of dims.

    Inputs are position ids (batch, seq), hidden states and rotary embeddings (batch, seq, width), and masks
    (batch, 1 or heads, seq, seq). Dims of size 1 are skipped, because torch specializes on them.
    """
    dims = {2: (1,), 3: (1,), 4: (2, 3)}.get(tensor.dim(), ())
    return tuple(dim for dim in dims if tensor.shape[dim] > 1)


def checkpoint_activations(
    model: PreTrainedModel, policy: ActivationCheckpointing, anatomy: Anatomy | None = None
) -> None:
    """Apply activation checkpointing to decoder layers in place: save less in the forward, recompute in the backward.

    Policies: full saves only each layer's input (a third more FLOPs); alternate does so for every other layer of the
    model; selective also saves the outputs of matmuls and attention, so that only cheap operators are recomputed.
    Parameter names do not change, because only forwards are replaced. The recomputation runs inside FSDP's hooks, where
    the layer's parameters are unsharded anyway.

    Raises ValueError for `auto`, which must be resolved to another policy first.
    """
    if policy == ActivationCheckpointing.auto:
        raise ValueError("parallelism.activation_checkpointing=auto: resolve it with choose_checkpointing first")
    if policy == ActivationCheckpointing.none:
        return
    if policy == ActivationCheckpointing.selective and model.config._attn_implementation == "flex_attention":
        wrap_compiled_regions()
    options: dict[str, Any] = {"context_fn": selective_contexts} if policy == ActivationCheckpointing.selective else {}
    layers = decoder_layers(model, anatomy)[:: 1 + (policy == ActivationCheckpointing.alternate)]
    for layer in filter(_has_parameters, layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def _has_parameters(layer: nn.Module) -> bool:
    """Return whether a layer is real; placeholders of other pipeline stages have no parameters."""
    return any(True for _ in layer.parameters())
