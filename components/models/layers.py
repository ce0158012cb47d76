"""Decoder layers of a model: finding and checkpointing them; and parameter counts.

Under pipeline parallelism, placeholders without parameters replace the layers of other stages. They keep their index in
the list and are left unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from components.config.schema.parallelism import ActivationCheckpointing
from components.exchange import all_gather_json
from components.models.activations.selective_recompute import selective_contexts, wrap_compiled_regions
from components.models.anatomy import Anatomy, read_anatomy
from components.models.lora import quantized_layers
from components.models.weights.shards import local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORM = re.compile("Norm(?!al)")
"""Matches the class name of a norm; not that of a NormalizedLinear."""


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
        raise ValueError("parallelism.activation_checkpointing=auto: resolve it with choose_recompute_policy first")
    if policy == ActivationCheckpointing.none:
        return
    if policy == ActivationCheckpointing.selective and model.config._attn_implementation == "flex_attention":
        wrap_compiled_regions()
    options: dict[str, Any] = {"context_fn": selective_contexts} if policy == ActivationCheckpointing.selective else {}
    layers = decoder_layers(model, anatomy)[:: 1 + (policy == ActivationCheckpointing.alternate)]
    for layer in filter(has_parameters, layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def vector_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are vectors or stacks of vectors: biases, weights of norms, and all of one dim.

    Stacked ones have as many dims as matrices: the biases of all experts, the norms of all heads.
    """
    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() < 2 or name.endswith("bias") or NORM.search(type(module).__name__)
    }


def has_parameters(layer: nn.Module) -> bool:
    """Return whether a layer is real; placeholders of other pipeline stages have no parameters."""
    return any(True for _ in layer.parameters())
