"""Adding adapters to a model, operations on all of its adapters, and LoRA on the fused matrices of experts.

Each expert has its own pair of factors, as PEFT's `target_parameters` define. A module of experts keeps its class's
forward, which reads its matrices as attributes in whichever implementation transformers selected. So the forward runs
with the adapted matrices, W + scaling B A, in place of the parameters. They are computed once per forward, and need as
much memory as the frozen ones while the layer runs. The factors' first dim is that of the experts, so expert and tensor
parallelism and FSDP2 shard them like the experts they belong to.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.schema.run import PeftConfig, PeftExport
from components.models.anatomy import Adapted, is_experts, stores_transposed
from components.models.classifier import TokenScores
from components.models.lora_linear import (
    LoraLayer,
    QuantizedLoraLinear,
    adapted_linear,
    ends_with,
    set_magnitudes,
    target_layers,
)
from components.models.weights.shards import fill, local_part
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FACTORS = ("_lora_A", "_lora_B")
"""Suffixes that a matrix's name gets for the names of its factors."""


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
    experts = _target_experts(model, cfg)
    model.requires_grad_(False)
    for name in targets:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        parent.register_module(leaf, adapted_linear(parent.get_submodule(leaf), cfg))
    for path, names in experts.items():
        _adapt_experts(model.get_submodule(path), names, cfg)
    if isinstance(model, TokenScores):
        model.score.to(torch.promote_types(model.score.weight.dtype, torch.float32)).requires_grad_(True)


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer | _LoraExperts]:
    """Return the layers and experts with adapters by name; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer | _LoraExperts)}


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
        if isinstance(layer, _LoraExperts):
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


def expert_factors(name: str) -> list[str]:
    """Return the names that the factors of the experts' matrix `name` have."""
    return [f"{name}{suffix}" for suffix in FACTORS]


class _LoraExperts(Adapted, nn.Module):
    """Base class of adapted modules of experts; the module's class becomes a subclass of it and of its own class."""

    scaling: float
    adapted: tuple[str, ...]
    """Names of the adapted matrices, in the module's order. The factors of NAME are the parameters NAME_lora_A
    (experts, rank, in) and NAME_lora_B (experts, out, rank)."""
    is_off: bool = False
    """Whether to skip the adapters; set by `adapters_off`."""

    def adapt(self, names: tuple[str, ...], cfg: PeftConfig) -> None:
        """Add uninitialized factors for the matrices `names`, on their device."""
        self.scaling, self.adapted = cfg.scaling, names
        for name in names:
            weight: Any = self._parameters[name]
            experts, features_out, features_in = weight.shape
            if stores_transposed(self):
                features_in, features_out = features_out, features_in
            # The optimizer updates the factors, so they are at least float32, whatever the dtype of the experts.
            dtype = torch.promote_types(weight.dtype, torch.float32)
            shapes = ((experts, cfg.rank, features_in), (experts, features_out, cfg.rank))
            for factor, shape in zip(expert_factors(name), shapes, strict=True):
                self.register_parameter(factor, nn.Parameter(torch.empty(shape, dtype=dtype, device=weight.device)))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Apply the experts, with the arguments of their own class: hidden states, chosen experts, router weights."""
        if self.is_off:
            return super().forward(*args, **kwargs)
        with self._adapted_matrices():
            return super().forward(*args, **kwargs)

    @contextmanager
    def _adapted_matrices(self) -> Iterator[None]:
        """Replace the adapted parameters by W + scaling B A within the context. They may be shards of the experts."""
        frozen: dict[str, Any] = {name: self._parameters[name] for name in self.adapted}
        merged: dict[str, Any] = {}
        for name, weight in frozen.items():
            lora_A, lora_B = (getattr(self, factor).to(weight.dtype) for factor in expert_factors(name))
            left, right = (lora_A.mT, lora_B.mT) if stores_transposed(self) else (lora_B, lora_A)
            merged[name] = torch.baddbmm(weight, left, right, alpha=self.scaling)
        self._parameters.update(merged)
        try:
            yield
        finally:
            self._parameters.update(frozen)


def _adapt_experts(module: nn.Module, names: tuple[str, ...], cfg: PeftConfig) -> None:
    """Add adapters to the matrices `names` of a module of experts, in place."""
    cls = type(module)
    # A subclass rather than a wrapper, so that parameters keep their names and deep copies keep their forward.
    module.__class__ = type(f"Lora{cls.__name__}", (_LoraExperts, cls), {})
    module.adapt(names, cfg)  # type: ignore[operator]


def _target_experts(model: PreTrainedModel, cfg: PeftConfig) -> dict[str, tuple[str, ...]]:
    """Return the experts' modules that peft.target_parameters selects, by name, with the names of their matrices.

    Raises ConfigError for a target that matches no matrix of fused experts.
    """
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    matrices = {
        f"{path}.{name}": (path, name)
        for path, module in modules.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    problems = [
        _no_such_parameter(model, target, matrices)
        for target in cfg.target_parameters
        if not any(ends_with(full, target) for full in matrices)
    ]
    if problems:
        raise ConfigError(problems)
    chosen: dict[str, tuple[str, ...]] = {}
    for full, (path, name) in matrices.items():
        if any(ends_with(full, target) for target in cfg.target_parameters):
            chosen[path] = (*chosen.get(path, ()), name)
    return chosen


def _no_such_parameter(model: PreTrainedModel, target: str, matrices: dict[str, tuple[str, str]]) -> str:
    given, kind = f"peft.target_parameters=[{target}]", type(model).__name__
    if not matrices:
        return f"{given}: {kind} has no fused experts; remove peft.target_parameters"
    short = sorted({".".join(full.split(".")[-3:]) for full in matrices})
    if any(ends_with(name, target) for name, _ in model.named_parameters()):
        reason = "is not a matrix of fused experts; linear layers belong into peft.targets"
    else:
        leaves = {each.rpartition(".")[2]: each for each in short} | {each: each for each in short}
        nearest = difflib.get_close_matches(target, leaves, n=1, cutoff=0.6)
        reason = f"{kind} has no such parameter{f'; did you mean {leaves[nearest[0]]}?' if nearest else ''}"
    return f"{given}: {reason}; choose some of {', '.join(short)}"
