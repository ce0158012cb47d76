"""LoRA on the fused matrices of experts: each expert has its own pair of factors, as PEFT's `target_parameters` define.

A module of experts keeps its class's forward, which reads its matrices as attributes in whichever implementation
transformers selected. So the forward runs with the adapted matrices, W + scaling B A, in place of the parameters. They
are computed once per forward, and need as much memory as the frozen ones while the layer runs. The factors' first dim
is that of the experts, so expert and tensor parallelism and FSDP2 shard them like the experts they belong to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.errors import ConfigError
from components.config.schema.peft import PeftConfig
from components.models.anatomy import is_experts, stores_transposed
from components.models.lora.linear import ends_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FACTORS = ("_lora_A", "_lora_B")
"""Suffixes that a matrix's name gets for the names of its factors."""


def expert_factors(name: str) -> list[str]:
    """Return the names that the factors of the experts' matrix `name` have."""
    return [f"{name}{suffix}" for suffix in FACTORS]


class LoraExperts(nn.Module):
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


def adapt_experts(module: nn.Module, names: tuple[str, ...], cfg: PeftConfig) -> None:
    """Add adapters to the matrices `names` of a module of experts, in place."""
    cls = type(module)
    # A subclass rather than a wrapper, so that parameters keep their names and deep copies keep their forward.
    module.__class__ = type(f"Lora{cls.__name__}", (LoraExperts, cls), {})
    module.adapt(names, cfg)  # type: ignore[operator]


def target_experts(model: PreTrainedModel, cfg: PeftConfig) -> dict[str, tuple[str, ...]]:
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
        why = "is not a matrix of fused experts; linear layers belong into peft.targets"
    else:
        leaves = {each.rpartition(".")[2]: each for each in short} | {each: each for each in short}
        nearest = difflib.get_close_matches(target, leaves, n=1, cutoff=0.6)
        why = f"{kind} has no such parameter{f'; did you mean {leaves[nearest[0]]}?' if nearest else ''}"
    return f"{given}: {why}; choose some of {', '.join(short)}"
