"""Reference training in one process of plain PyTorch, with whose curve every mesh is compared.

The reference shares no code with the training step: it runs each sample separately and without padding, divides once by
the number of targets, and uses torch's own gradient clipping and unfused AdamW.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from components import training
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.training import StageConfig
from components.models.layers import vector_parameters

Sample = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of one sequence without padding, (seq,) each."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters that the reference and every mesh share."""

    optimizer: AdamWConfig
    steps: int
    """Steps to train."""
    max_steps: int
    """Length of the learning-rate schedule."""
    max_grad_norm: float = 1.0
    autocast: torch.dtype | None = None
    """Autocast dtype of the reference; None: compute in the dtype of the parameters."""
    router_aux: float = 0.0
    """Coefficient of the routers' auxiliary loss; 0: no auxiliary loss."""
    label_smoothing: float = 0.0
    """Probability mass of each target that is distributed evenly over the vocabulary."""
    z_loss: float = 0.0
    """Coefficient of the squared log of the softmax denominator."""
    stages: tuple[StageConfig, ...] = ()
    """Stages of the run, which may change the learning rate."""


@dataclass(slots=True)
class Curve:
    """Loss and gradient norm of each step, and the gradients of the first step by parameter name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def reference(model: nn.Module, samples_of: Callable[[int], Iterable[Sample]], settings: Hyperparameters) -> Curve:
    """Train `model` in place on the samples of each step and return its curve."""
    curve, config = Curve(), settings.optimizer
    device = next(model.parameters()).device
    vectors = vector_parameters(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups: list[dict[str, Any]] = []
    for name, parameter in trained.items():
        group = {"lr": config.lr, "weight_decay": 0.0 if parameter in vectors else config.weight_decay}
        matching = [rule for rule in config.groups if re.search(rule["match"], name)]
        group |= {key: value for key, value in (matching[0] if matching else {}).items() if key != "match"}
        groups.append({"params": [parameter], "scale": group["lr"] / config.lr, **group})
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, foreach=False
    )
    for step in range(settings.steps):
        optimizer.zero_grad()
        samples = list(samples_of(step))
        # Of the whole step, so that the divisor does not depend on how samples are divided over ranks.
        count = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
        total = 0.0
        for tokens, labels in samples:
            router_options = {"output_router_logits": True} if settings.router_aux else {}
            autocast = torch.autocast(device.type, dtype=settings.autocast, enabled=settings.autocast is not None)
            with autocast, _whole_precision(model):
                output = model(input_ids=tokens[None].to(device), use_cache=False, **router_options)
            logits = _at_least_float32(output.logits[0, :-1])  # (seq - 1, vocabulary)
            loss = F.cross_entropy(logits, labels[1:].to(device), ignore_index=-100, reduction="sum")
            if settings.label_smoothing or settings.z_loss:
                loss = _smoothed_loss(logits[labels[1:] != -100], labels[1:][labels[1:] != -100], settings)
            if router_options:
                top_k = cast(Any, model.config).get_text_config().num_experts_per_tok
                balance = balance_loss(output.router_logits, top_k)
                loss = loss + settings.router_aux * int((labels[1:] != -100).sum()) * balance
            (loss / count).backward()
            total += float(loss.detach())
        if step == 0:
            curve.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = _norm_of(p.grad for p in model.parameters() if p.grad is not None)
        curve.losses.append(total / count)
        curve.norms.append(float(norm))
        if settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                model.parameters(), settings.max_grad_norm, norm.to(groups[0]["params"][0].dtype)
            )
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * training.learning_rate(config, step, settings.max_steps, settings.stages)
        optimizer.step()
    return curve


def _smoothed_loss(logits: torch.Tensor, targets: torch.Tensor, settings: Hyperparameters) -> torch.Tensor:
    """Return the summed loss with label smoothing and z-loss, computed literally as in their papers.

    Args:
        logits: (targets, vocabulary).
        targets: (targets,), without ignored targets.
    """
    denominators = logits.exp().sum(1)  # (targets,)
    probabilities = logits.exp() / denominators[:, None]
    smoothed = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    smoothed = (1 - settings.label_smoothing) * smoothed + settings.label_smoothing / logits.shape[1]
    return -(smoothed * probabilities.log()).sum() + settings.z_loss * (denominators.log() ** 2).sum()


def balance_loss(router_logits: Iterable[torch.Tensor], top_k: int) -> torch.Tensor:
    """Return the auxiliary loss of one sequence without padding, from each layer's router logits (tokens, experts)."""
    losses = []
    for logits in router_logits:
        probabilities = _at_least_float32(logits).softmax(dim=-1)
        chosen = F.one_hot(logits.topk(top_k).indices, logits.shape[-1]).sum(dim=1).to(probabilities.dtype)
        losses.append(logits.shape[-1] * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in float32, or unchanged if it is float64: losses are never computed below float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _norm_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the global norm of all gradients, computed in float64.

    torch's own norm of a large float32 tensor is not accurate enough on the CPU.
    """
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()


def compute_in_float64(model: nn.Module) -> None:
    """Make a float64 model compute everything in float64, in place.

    transformers casts to float32 in norms, rotary embeddings and routers, which helps bfloat16 but would hide the small
    differences that a float64 comparison looks for. So the forwards of decoder layers, and of leaf modules outside
    torch, are patched to cast to float64 instead. Experts use the eager implementation, as torch's grouped GEMM does
    not support float64.
    """
    if any(getattr(module, "num_experts", None) for module in model.modules()):
        model.set_experts_implementation("eager")  # type: ignore[operator]
    modules = list(model.modules())
    whole = {layer for each in modules if isinstance(each, nn.ModuleList) for layer in each}
    for module in modules:
        from_torch, is_leaf = type(module).__module__.startswith("torch."), not list(module.children())
        if not from_torch and (is_leaf or module in whole) and "forward" not in vars(module):
            module.forward = types.MethodType(_forward_in_float64, module)


def _forward_in_float64(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _NoFloat32():
        return type(self).forward(self, *args, **kwargs)


def _whole_precision(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a float64 model's own forward casts nothing down (Nemotron-H's logits)."""
    return _NoFloat32() if next(model.parameters()).dtype == torch.float64 else nullcontext()


class _NoFloat32(TorchFunctionMode):
    """Torch function mode that replaces casts to float32, and float32 arguments, with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
