"""RMSNorms, rotary position embeddings and SwiGLUs in fewer kernels than transformers', where both compute the same.

Each class of a model is compared with its replacement on random values, so that no list of model types is needed. On a
GPU, SwiGLU takes one kernel forward and one backward (triton_kernels.py).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

_ROTARY = "apply_rotary_pos_emb"
"""Function of transformers' modeling files that rotates queries and keys."""
_NORM_TOLERANCE = 1e-6
"""Largest relative difference of two norms in float64; transformers' norms compute in float32."""
_ROTARY_TOLERANCE = _SWIGLU_TOLERANCE = 1e-12
_WIDTH = 8
"""Features of the random values."""
_CANNOT_COMPUTE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a model's own code on the random values: it needs other inputs, and computes something else."""


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Number of modules whose computation was replaced."""

    norms: int
    rotary: int
    """Attention modules."""
    swiglus: int
    """MLPs."""

    def __str__(self) -> str:
        return f"fused: {self.norms} RMSNorms, rotary embeddings of {self.rotary} layers, SwiGLU of {self.swiglus} MLPs"


class FusedNorm(nn.Module):
    """Base class of replaced RMSNorms; a module's class becomes a subclass of it and of its own class."""

    fused_eps: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden); rounded once, from float32."""
        weight: Any = self.weight
        if hidden.dtype != weight.dtype:  # autocast: the model's own norm decides the dtype of the result
            return super().forward(hidden)
        return rms_norm(hidden, weight, self.fused_eps)


class _FusedMLP(nn.Module):
    """Base class of replaced MLPs with projections of their own for gate and up."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)."""
        module: Any = self
        return module.down_proj(swiglu(module.gate_proj(hidden), module.up_proj(hidden)))


class _FusedJointMLP(nn.Module):
    """Base class of replaced MLPs with one projection for gate and up, such as Phi-3's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., hidden)."""
        module: Any = self
        gate, up = module.gate_up_proj(hidden).chunk(2, dim=-1)
        return module.down_proj(swiglu(gate, up))


_MLPS = {
    frozenset({"gate_proj", "up_proj", "down_proj"}): _FusedMLP,
    frozenset({"gate_up_proj", "down_proj"}): _FusedJointMLP,
}
"""Names of an MLP's linear layers -> base class of its replacement."""


def fuse_layers(model: nn.Module) -> FusedLayers:
    """Replace the RMSNorms, rotary embeddings and SwiGLUs of a model, in place; parameters and names do not change.

    Call it before the model is parallelized. Modules that compute something else keep their own forward.
    """
    norms = rotary = swiglus = 0
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
        elif (base := _MLPS.get(_linear_names(module))) and _is_swiglu(module, base):
            if key not in classes:
                classes[key] = type(f"Fused{kind.__name__}", (base, kind), {})
            swiglus += _change_class(module, classes[key])
    return FusedLayers(norms, rotary, swiglus)


def _change_class(module: nn.Module, cls: type | None) -> bool:
    # A subclass rather than a wrapper, so that parameters keep their names and deep copies keep their forward.
    if cls is not None:
        module.__class__ = cls
    return cls is not None


def _eps(norm: nn.Module) -> float | None:
    """Return the constant of a norm with one weight vector; None for any other module."""
    if [(name, each.dim()) for name, each in norm.named_parameters()] != [("weight", 1)]:
        return None
    epsilons = {value for name in ("eps", "variance_epsilon") if isinstance(value := getattr(norm, name, None), float)}
    return epsilons.pop() if len(epsilons) == 1 else None


def _fused_norm(norm: nn.Module, eps: float) -> type | None:
    """Return the class that replaces a norm's; None if it computes something else."""
    kind: Any = type(norm)
    if len(inspect.signature(kind.forward).parameters) != 2:  # self and hidden: others have a gate
        return None
    probe: Any = copy.copy(norm)
    generator = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.no_grad():
        weight = torch.rand(_WIDTH, generator=generator, dtype=torch.float64) + 0.5
        hidden = 3 * torch.randn(4, _WIDTH, generator=generator, dtype=torch.float64)
        probe._parameters = {"weight": nn.Parameter(weight)}
    if not _agree(lambda: kind.forward(probe, hidden), lambda: rms_norm(hidden, weight, eps), _NORM_TOLERANCE):
        return None
    return type(f"Fused{kind.__name__}", (FusedNorm, kind), {"fused_eps": eps})


def _calls_rotary(kind: type) -> bool:
    forward = kind.__dict__.get("forward")
    return inspect.isfunction(forward) and forward.__closure__ is None and _ROTARY in forward.__code__.co_names


def _fused_rotary(kind: Any) -> type | None:
    """Return the class that replaces an attention's; None if its rotary embedding is another one.

    Its forward is the same code, in which the name of the rotary function means `rotate`.
    """
    forward = kind.forward
    own = forward.__globals__.get(_ROTARY)
    if own is None or not _rotates_halves(own):
        return None
    replaced: Any = FunctionType(
        forward.__code__, {**forward.__globals__, _ROTARY: rotate}, forward.__name__, forward.__defaults__
    )
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Fused{kind.__name__}", (kind,), {"forward": replaced})


def _rotates_halves(own: Callable[..., Any]) -> bool:
    """Return whether a rotary function computes the same as `rotate`, for heads that are rotated whole or in part."""
    if list(inspect.signature(own).parameters) != list(inspect.signature(rotate).parameters):
        return False
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with unset_fake_temporarily():
        heads = draw(2, 3, 5, _WIDTH), draw(2, 1, 5, _WIDTH)
        whole, part = ((*heads, draw(2, 5, width), draw(2, 5, width)) for width in (_WIDTH, _WIDTH // 2))
    if not _agree(lambda: own(*whole), lambda: rotate(*whole), _ROTARY_TOLERANCE):
        return False
    # A function that cannot rotate a part of a head is never called so.
    return _fails(lambda: own(*part)) or _agree(lambda: own(*part), lambda: rotate(*part), _ROTARY_TOLERANCE)


def _agree(own: Callable[[], Any], fused: Callable[[], Any], tolerance: float) -> bool:
    """Return whether two functions return the same tensor or tensors; False if one of them fails."""
    try:
        with unset_fake_temporarily(), torch.no_grad():
            ours, theirs = fused(), own()
    except _CANNOT_COMPUTE:
        return False
    pairs = zip(*([each] if isinstance(each, torch.Tensor) else each for each in (theirs, ours)), strict=True)
    return all(
        isinstance(one, torch.Tensor)
        and one.shape == two.shape
        and torch.allclose(one.double(), two, rtol=tolerance, atol=tolerance)
        for one, two in pairs
    )


def _fails(own: Callable[[], Any]) -> bool:
    try:
        with unset_fake_temporarily(), torch.no_grad():
            own()
    except _CANNOT_COMPUTE:
        return True
    return False


def _linear_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if isinstance(child, nn.Linear))


def _is_swiglu(mlp: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether an MLP computes the same as its replacement; a layer may have an activation of its own."""
    kind: Any = type(mlp)
    linear_names = _linear_names(mlp)
    if len(inspect.signature(kind.forward).parameters) != 2:  # self and hidden
        return False
    if {name.partition(".")[0] for name, _ in mlp.named_parameters()} != linear_names:  # BitNet's has a norm
        return False
    probe: Any = copy.copy(mlp)
    generator = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.no_grad():
        probe._modules = dict(mlp._modules)
        for name in sorted(linear_names):
            outputs = 2 * _WIDTH if name == "gate_up_proj" else _WIDTH
            linear = nn.Linear(_WIDTH, outputs, bias=False, dtype=torch.float64, device="cpu")
            linear.weight.copy_(torch.randn(outputs, _WIDTH, generator=generator, dtype=torch.float64))
            probe._modules[name] = linear
        hidden = torch.randn(4, _WIDTH, generator=generator, dtype=torch.float64)
    return _agree(lambda: kind.forward(probe, hidden), lambda: base.forward(probe, hidden), _SWIGLU_TOLERANCE)


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
        cos: (batch, seq, rotated), as sin. Features of a head beyond the first `rotated` do not change.
        unsqueeze_dim: Dim of q and k that cos and sin lack.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    queries: Any = _Rotate.apply(q, cos, sin)
    keys: Any = _Rotate.apply(k, cos, sin)
    return queries, keys


class _Rotate(torch.autograd.Function):
    """x * cos + (-x2, x1) * sin for the two halves x1, x2 of the rotated features: three kernels each way if these are
    all features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype, width = x.dtype, cos.shape[-1]
        half = width // 2
        output = _scaled(x, cos)
        output[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1)
        output[..., half:width].addcmul_(x[..., :half], sin[..., half:])
        return output.to(x.dtype)  # OLMo's cos and sin are float32, and attention needs the dtype of the values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        width = cos.shape[-1]
        half = width // 2
        result = _scaled(grad, cos)
        result[..., :half].addcmul_(grad[..., half:width], sin[..., half:])
        result[..., half:width].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return result.to(ctx.dtype), None, None


def _scaled(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Return x (..., head_dim) whose first features are multiplied by cos (..., rotated)."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos
    return torch.cat((x[..., :width] * cos, x[..., width:]), -1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, (..., width) as both (Shazeer 2020, arXiv:2002.05202).

    The backward computes silu(gate) again, so that a layer saves one tensor of its MLP's width less.
    """
    product: Any = _SwiGLU.apply(gate, up)
    return product


class _SwiGLU(torch.autograd.Function):
    """On a GPU one kernel forward and one backward, rounded once; on a CPU the operators and bits of transformers."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu_on_gpu(gate, up) if gate.is_cuda else F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        if gate.is_cuda:
            grad_gate, grad_up = _swiglu_backward_on_gpu(grad, gate, up)
            return grad_gate, grad_up
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


# Operators, so that fake tensors and the policies of activation checkpointing need no Triton.
@torch.library.custom_op("meshbook::swiglu", mutates_args=(), device_types="cuda")
def _swiglu_on_gpu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up from one kernel."""
    from components.models.triton_kernels import launch_swiglu

    return launch_swiglu(gate, up)


@torch.library.custom_op("meshbook::swiglu_backward", mutates_args=(), device_types="cuda")
def _swiglu_backward_on_gpu(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up from one kernel."""
    from components.models.triton_kernels import launch_swiglu_backward

    return launch_swiglu_backward(grad, gate, up)


@_swiglu_on_gpu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@_swiglu_backward_on_gpu.register_fake
def _(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)
