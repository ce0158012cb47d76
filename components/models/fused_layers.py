"""RMSNorms and rotary position embeddings in fewer kernels than transformers' own, where both compute the same.

Each class of a model is compared with its replacement on random values, so that no list of model types is needed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

ROTARY = "apply_rotary_pos_emb"
"""Function of transformers' modeling files that rotates queries and keys."""
NORM_TOLERANCE = 1e-6
"""Largest relative difference of two norms in float64; transformers' norms compute in float32."""
ROTARY_TOLERANCE = 1e-12
WIDTH = 8
"""Features of the random values."""


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Number of modules whose computation was replaced."""

    norms: int
    rotary: int
    """Attention modules."""

    def __str__(self) -> str:
        return f"fused: {self.norms} RMSNorms, rotary embeddings of {self.rotary} layers"


class FusedNorm(nn.Module):
    """Base class of replaced RMSNorms; a module's class becomes a subclass of it and of its own class."""

    fused_eps: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden); rounded once, from float32."""
        weight: Any = self.weight
        if hidden.dtype != weight.dtype:  # autocast: the model's own norm decides the dtype of the result
            return super().forward(hidden)
        return rms_norm(hidden, weight, self.fused_eps)


def fuse_layers(model: nn.Module) -> FusedLayers:
    """Replace the RMSNorms and rotary embeddings of a model, in place; parameters and their names do not change.

    Call it before the model is parallelized. Modules that compute something else keep their own forward.
    """
    norms = rotary = 0
    classes: dict[tuple[type, float | None], type | None] = {}
    for module in model.modules():
        kind = type(module)
        eps = _eps(module) if kind.__name__.endswith("RMSNorm") else None
        key = (kind, eps)
        if eps is not None:
            if key not in classes:
                classes[key] = _fused_norm(module, eps)
            norms += _change_class(module, classes[key])
        elif _calls_rotary(kind):
            if key not in classes:
                classes[key] = _fused_rotary(kind)
            rotary += _change_class(module, classes[key])
    return FusedLayers(norms, rotary)


def _change_class(module: nn.Module, cls: type | None) -> bool:
    # A subclass rather than a wrapper, so that parameters keep their names and deep copies keep their forward.
    if cls is not None:
        module.__class__ = cls
    return cls is not None


def _eps(norm: nn.Module) -> float | None:
    """Return the constant of a norm with one weight vector; None for any other module."""
    if [(name, each.dim()) for name, each in norm.named_parameters()] != [("weight", 1)]:
        return None
    found = {value for name in ("eps", "variance_epsilon") if isinstance(value := getattr(norm, name, None), float)}
    return found.pop() if len(found) == 1 else None


def _fused_norm(norm: nn.Module, eps: float) -> type | None:
    """Return the class that replaces a norm's; None if it computes something else."""
    kind: Any = type(norm)
    if len(inspect.signature(kind.forward).parameters) != 2:  # self and hidden: others have a gate
        return None
    probe: Any = copy.copy(norm)
    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight = torch.rand(WIDTH, generator=generator, dtype=torch.float64) + 0.5
        hidden = 3 * torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
        probe._parameters = {"weight": nn.Parameter(weight)}
        own, fused = kind.forward(probe, hidden), rms_norm(hidden, weight, eps)
    if not torch.allclose(own.double(), fused, rtol=NORM_TOLERANCE, atol=NORM_TOLERANCE):
        return None
    return type(f"Fused{kind.__name__}", (FusedNorm, kind), {"fused_eps": eps})


def _calls_rotary(kind: type) -> bool:
    forward = kind.__dict__.get("forward")
    return inspect.isfunction(forward) and forward.__closure__ is None and ROTARY in forward.__code__.co_names


def _fused_rotary(kind: Any) -> type | None:
    """Return the class that replaces an attention's; None if its rotary embedding is another one.

    Its forward is the same code, in which the name of the rotary function means `rotate`.
    """
    forward = kind.forward
    own = forward.__globals__.get(ROTARY)
    if own is None or not _rotates_halves(own):
        return None
    replaced: Any = FunctionType(
        forward.__code__, {**forward.__globals__, ROTARY: rotate}, forward.__name__, forward.__defaults__
    )
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Fused{kind.__name__}", (kind,), {"forward": replaced})


def _rotates_halves(own: Callable[..., Any]) -> bool:
    """Return whether a rotary function computes the same as `rotate`."""
    if list(inspect.signature(own).parameters) != list(inspect.signature(rotate).parameters):
        return False

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        tensors = draw(2, 3, 5, WIDTH), draw(2, 1, 5, WIDTH), draw(2, 5, WIDTH), draw(2, 5, WIDTH)
        return all(
            torch.allclose(one, two, rtol=ROTARY_TOLERANCE, atol=ROTARY_TOLERANCE)
            for one, two in zip(own(*tensors), rotate(*tensors), strict=True)
        )


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return hidden / sqrt(mean(hidden^2) + eps) * weight, (..., hidden), computed in float32 or wider, rounded once.

    torch's `rms_norm` has one kernel on a GPU, but on a CPU autograd saves its intermediate results. Here the backward
    needs the same tensors on both, so that a CPU shows the memory of a GPU.
    """
    output: Any = _RMSNorm.apply(hidden, weight, eps)
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if hidden.is_cuda:
            output, scale = torch.ops.aten._fused_rms_norm(hidden, list(weight.shape), weight, eps)
        else:
            wide = _widened(hidden)
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
            output = (wide * scale * weight).to(hidden.dtype)
        ctx.save_for_backward(hidden, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:2])
        if hidden.is_cuda:
            grads = torch.ops.aten._fused_rms_norm_backward(grad, hidden, list(weight.shape), scale, weight, needs)
            return grads[0] if needs[0] else None, grads[1] if needs[1] else None, None
        normalized, wide = _widened(hidden) * scale, _widened(grad)
        weighted = wide * weight
        grad_hidden = scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))
        grad_weight = (wide * normalized).flatten(0, -2).sum(0).to(weight.dtype) if needs[1] else None
        return grad_hidden.to(hidden.dtype), grad_weight, None


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions, with the signature of transformers' function.

    Args:
        q: (batch, heads, seq, head_dim); k: (batch, kv_heads, seq, head_dim).
        cos: (batch, seq, head_dim), as sin.
        unsqueeze_dim: Dim of q and k that cos and sin lack.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    queries: Any = _Rotate.apply(q, cos, sin)
    keys: Any = _Rotate.apply(k, cos, sin)
    return queries, keys


class _Rotate(torch.autograd.Function):
    """x * cos + (-x2, x1) * sin for the two halves x1, x2 of the last dim: three kernels forward, three backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype, half = x.dtype, x.shape[-1] // 2
        output = x * cos
        output[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        output[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        result = grad * cos
        result[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        result[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return result.to(ctx.dtype), None, None
