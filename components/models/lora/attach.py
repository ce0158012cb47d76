"""Adding adapters to a model, and operations on all of its adapters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.config.schema.peft import PeftConfig, PeftExport
from components.models.classifier import TokenScores
from components.models.lora.experts import LoraExperts, adapt_experts, expert_factors, target_experts
from components.models.lora.linear import (
    LoraLayer,
    QuantizedLoraLinear,
    adapted_linear,
    set_magnitudes,
    target_layers,
)
from components.models.weights.shards import fill, local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, cfg: PeftConfig, *, exports: bool = True) -> None:
    """Freeze a model and add adapters to its target layers and experts in place; do nothing for peft.method=none.

    A score head, whose weights no pretrained model has, is trained too, in float32 or wider. Call it before the model
    is sharded, usually on the meta device. `fill_weights` initializes the adapters.

    Args:
        exports: Whether the run writes an export; PEFT must then be able to read the adapters, unless peft.export
            merges them.

    Raises ConfigError for a target that matches no layer, a layer that cannot be adapted, or one that PEFT cannot read.
    """
    if not cfg.adapts:
        return
    targets = target_layers(model, cfg, exports and cfg.export != PeftExport.merged)
    experts = target_experts(model, cfg)
    model.requires_grad_(False)
    for name in targets:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        parent.register_module(leaf, adapted_linear(parent.get_submodule(leaf), cfg))
    for path, names in experts.items():
        adapt_experts(model.get_submodule(path), names, cfg)
    if isinstance(model, TokenScores):
        model.score.to(torch.promote_types(model.score.weight.dtype, torch.float32)).requires_grad_(True)


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer | LoraExperts]:
    """Return the layers and experts with adapters by name; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer | LoraExperts)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which adapted layers compute without their adapters."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLoraLinear]:
    """Return the layers with packed weights by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, QuantizedLoraLinear)}


def scaling_of(model: nn.Module) -> float:
    """Return the scaling factor that all adapters of a model share; 0 for a model without adapters."""
    return next((layer.scaling for layer in adapted_layers(model).values()), 0.0)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Initialize adapters so that they do not change the model: A random as in PEFT, B zero, magnitudes W's row norms.

    A depends only on the seed and its name, not on the mesh. The global random state does not change. Call it on all
    ranks, after the model's own weights were filled.
    """
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, LoraExperts):
            for matrix in layer.adapted:
                first, second = (layer.get_parameter(factor) for factor in expert_factors(matrix))
                _draw(first, f"{name}.{expert_factors(matrix)[0]}", seed)
                local_part(second).zero_()
            continue
        _draw(layer.lora_A, f"{name}.lora_A", seed)
        local_part(layer.lora_B).zero_()
        if layer.lora_magnitude_vector is not None:
            set_magnitudes(layer)


def _draw(factor: torch.Tensor, name: str, seed: int) -> None:
    """Set A, (..., rank, in), by Kaiming uniform with a = sqrt(5), the initialization of nn.Linear."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = (2 * torch.rand(*factor.shape, generator=generator) - 1) / math.sqrt(factor.shape[-1])
    fill(factor, name, drawn.__getitem__)
