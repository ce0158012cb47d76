"""A model's decoder layers: find them, recompute them in the backward, compile them; and count parameters.

Under pipeline parallelism a rank's model has stand-ins without parameters for the layers of other stages: they keep
their place in the list, and nothing is done to them.
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
from components.models.activations import keep_products, show_compiled_regions
from components.models.anatomy import Anatomy, read_anatomy
from components.models.compile_cache import remove_truncated_libraries
from components.models.lora import quantized_layers
from components.models.weights.shards import local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRAPH_LIMIT = 64
"""Graphs of all decoder layers together; torch's default of 8 is fewer than what Gemma 3 with adapters needs."""
GRAPH_LIMIT_BY_LENGTH = 1024
"""The same where each length of rows has graphs of its own."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Sizes of a model; a tied parameter counts once."""

    total: int
    """Values of all parameters, whole."""
    trainable: int
    """Values of those that are trained."""
    local_bytes: int
    """Memory of this rank's parts."""
    packed: int = 0
    """Values of those that are held in 4 bits."""

    def __str__(self) -> str:
        if self.trainable == self.total:
            return f"{self.total:,} parameters"
        trained = f"{self.total:,} parameters, {self.trainable:,} of them trained ({self.trainable / self.total:.2%})"
        return f"{trained}, {self.packed:,} frozen in NF4" if self.packed else trained


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count a model's parameters, whole and on this rank, whatever the mesh. Call it on all ranks.

    The ranks tell one another the names that they hold, so that those of other pipeline stages count too.
    """
    packed = {f"{name}.weight": each.in_features * each.out_features for name, each in quantized_layers(model).items()}
    mine = {
        name: (packed.get(name, parameter.numel()), parameter.requires_grad, name in packed)
        for name, parameter in model.named_parameters()
    }
    everyone = all_gather_json(mine)
    whole = {name: size for held in everyone for name, size in held.items()}
    parts = [local_part(parameter) for parameter in model.parameters()]
    return ParameterCounts(
        total=sum(size for size, _, _ in whole.values()),
        trainable=sum(size for size, trained, _ in whole.values() if trained),
        packed=sum(size for size, _, in_bits in whole.values() if in_bits),
        local_bytes=sum(part.numel() * part.element_size() for part in parts),
    )


def decoder_layers(model: nn.Module, anatomy: Anatomy | None = None) -> list[nn.Module]:
    """Return the decoder layers in order, placeholders of other pipeline stages included.

    Args:
        anatomy: The model's, read before it was parallelized; None: read it now.

    Raises:
        NotImplementedError: The model has none.
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
    """Compile the forward of each decoder layer in place; names and classes stay as they are.

    Only the layer's own forward is compiled: hooks around it, FSDP's among them, stay outside, and so does the
    recomputation of `checkpoint_activations`, before or after which this may be called. A layer that contains a forward
    which is closed to the compiler (experts on other ranks, attention over gathered keys) is compiled around it.

    Layers of one class share their graphs, and with them torch's limit of graphs, past which `fullgraph` raises. It is
    raised here: evaluation, training, frozen inputs under adapters and rows on both sides of a window multiply; and so
    do lengths of rows under tensor parallelism.
    """
    any_length = not _is_cut_by_tp(model)
    limit = GRAPH_LIMIT if any_length else GRAPH_LIMIT_BY_LENGTH
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    if backend == "inductor":
        remove_truncated_libraries()
    from transformers import AttentionInterface

    attention = AttentionInterface().get(model.config._attn_implementation)
    for layer in filter(_is_here, decoder_layers(model, anatomy)):
        forward = layer.forward
        closed = [attention, *(module.forward for module in layer.modules())]
        whole = fullgraph and not any(hasattr(each, "_torchdynamo_disable") for each in closed)
        recomputed = forward if isinstance(forward, partial) and forward.func is checkpoint else None
        inner = recomputed.args[0] if recomputed else forward
        compiled = torch.compile(inner, fullgraph=whole, backend=backend, dynamic=None if any_length else False)
        if any_length:
            compiled = partial(_call_compiled, compiled)
        layer.forward = partial(checkpoint, compiled, **recomputed.keywords) if recomputed else compiled


def _is_cut_by_tp(model: nn.Module) -> bool:
    """Whether matrices are DTensors of a tp axis: torch 2.13 fails to compile those for rows of any length."""
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)


def _call_compiled(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled layer, whose graph takes rows of any length from its first call on.

    Without that torch compiles the first length by itself, and any other for all. Packed rows have one length.
    """
    if kwargs.get(DOCUMENTS) is None:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor):
                for dim in _sequence_dims(each):
                    torch._dynamo.maybe_mark_dynamic(each, dim)
    return compiled(*args, **kwargs)


def _sequence_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of what a layer takes that are as long as rows, whatever their length.

    (batch, seq) of position ids, (batch, seq, width) of hidden states and rotary embeddings, (batch, 1 or heads, seq,
    seq) of masks.
    """
    dims = {2: (1,), 3: (1,), 4: (2, 3)}.get(tensor.dim(), ())
    return tuple(dim for dim in dims if tensor.shape[dim] > 1)


def checkpoint_activations(
    model: PreTrainedModel, policy: ActivationCheckpointing, anatomy: Anatomy | None = None
) -> None:
    """Keep less of decoder layers than the backward needs, and compute the rest again there: less memory, more work.

    full: only the input of every layer is kept, a third more work; alternate: of every other one of the whole model;
    selective: of every layer also the results of matrix products and attention, so that only what is cheap is computed
    again. A layer's forward is replaced in place, so parameter names stay as they are, and the recomputation happens
    inside FSDP's hooks, where the layer's parameters are together anyway.
    """
    if policy == ActivationCheckpointing.auto:
        raise ValueError("parallelism.activation_checkpointing=auto: resolve it with choose_recompute_policy first")
    if policy == ActivationCheckpointing.none:
        return
    if policy == ActivationCheckpointing.selective and model.config._attn_implementation == "flex_attention":
        show_compiled_regions()
    kept: dict[str, Any] = {"context_fn": keep_products} if policy == ActivationCheckpointing.selective else {}
    layers = decoder_layers(model, anatomy)[:: 1 + (policy == ActivationCheckpointing.alternate)]
    for layer in filter(_is_here, layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **kept)


def _is_here(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())
