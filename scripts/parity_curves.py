"""Two curves of one training: one process in plain PyTorch, and a mesh. What `parity.py` and the tests compare.

The reference shares nothing with the training step: it forwards each sample alone and without padding, divides once by
the number of target tokens, and uses torch's own clipping and unfused AdamW.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from components import training
from components.batch import Batch
from components.config.schema.objective import NextTokenConfig
from components.config.schema.optimizer import OptimizerConfig
from components.exchange import all_gather_json

Sample = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of one row without padding, (seq,) each."""

FLOOR = {torch.float64: 1e-6, torch.float32: 1e-3}
"""A gradient is measured against at least this part of the norm of all gradients: some are zero by mathematics (the
bias of a key projection), and what rounding leaves of them is no error."""

COMPARED_STEPS = 50
"""Steps of two curves that are compared. Training amplifies rounding: later, equal programs are apart as well."""


@dataclass(frozen=True, slots=True)
class Course:
    """What every training of a comparison does."""

    optimizer: OptimizerConfig
    steps: int
    max_steps: int
    """At which the learning rate's schedule ends."""
    max_grad_norm: float = 1.0
    autocast: torch.dtype | None = None
    """Type of the reference's matrix products, where it is not that of its parameters."""
    router_aux: float = 0.0
    """Coefficient of the routers' auxiliary loss; 0: none."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator."""


@dataclass(slots=True)
class Curve:
    """What a training showed: a loss and a gradient norm per step, and the first step's gradients by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def reference(model: nn.Module, samples_of: Callable[[int], Iterable[Sample]], course: Course) -> Curve:
    """Train `model` on the samples of each step in one process, and return its curve; the model is used up."""
    curve, config = Curve(), course.optimizer
    device = next(model.parameters()).device
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, foreach=False)
    for step in range(course.steps):
        optimizer.zero_grad()
        samples = list(samples_of(step))
        count = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
        total = 0.0
        for tokens, labels in samples:
            asked = {"output_router_logits": True} if course.router_aux else {}
            with torch.autocast(device.type, dtype=course.autocast, enabled=course.autocast is not None):
                output = model(input_ids=tokens[None].to(device), use_cache=False, **asked)
            logits = at_least_float32(output.logits[0, :-1])  # (seq - 1, vocabulary)
            loss = F.cross_entropy(logits, labels[1:].to(device), ignore_index=-100, reduction="sum")
            if course.label_smoothing or course.z_loss:
                loss = smoothed_loss(logits[labels[1:] != -100], labels[1:][labels[1:] != -100], course)
            if asked:
                balance = balance_loss(output.router_logits, model.config.get_text_config().num_experts_per_tok)
                loss = loss + course.router_aux * int((labels[1:] != -100).sum()) * balance
            (loss / count).backward()
            total += float(loss.detach())
        if step == 0:
            curve.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = norm_of(p.grad for p in model.parameters() if p.grad is not None)
        curve.losses.append(total / count)
        curve.norms.append(float(norm))
        if course.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), course.max_grad_norm, norm.to(decayed[0].dtype))
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate(config, step, course.max_steps)
        optimizer.step()
    return curve


def smoothed_loss(logits: torch.Tensor, targets: torch.Tensor, course: Course) -> torch.Tensor:
    """The losses of real targets, by the formulas of the papers: logits (targets, vocabulary), targets (targets,)."""
    denominators = logits.exp().sum(1)  # (targets,)
    probabilities = logits.exp() / denominators[:, None]
    wanted = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    wanted = (1 - course.label_smoothing) * wanted + course.label_smoothing / logits.shape[1]
    return -(wanted * probabilities.log()).sum() + course.z_loss * (denominators.log() ** 2).sum()


def balance_loss(router_logits: Iterable[torch.Tensor], top_k: int) -> torch.Tensor:
    """The auxiliary loss of one sequence, all of whose tokens are real: the mean over layers of (tokens, experts)."""
    losses = []
    for logits in router_logits:
        probabilities = at_least_float32(logits).softmax(dim=-1)
        chosen = F.one_hot(logits.topk(top_k).indices, logits.shape[-1]).sum(dim=1).to(probabilities.dtype)
        losses.append(logits.shape[-1] * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Losses are not computed in less."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def norm_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients: in float64, because torch's own for large float32 tensors is not exact on the CPU."""
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()


def train_on_mesh(
    model: training.Prepared,
    optimizer: torch.optim.Optimizer,
    batches_of: Callable[[int], list[Batch]],
    course: Course,
) -> Curve:
    """Train a prepared model on this rank's micro-batches of each step, and return its curve."""
    curve = Curve()
    for step in range(course.steps):
        training.set_learning_rate(optimizer, course.optimizer, step, course.max_steps)
        objective = training.NextToken(NextTokenConfig(label_smoothing=course.label_smoothing, z_loss=course.z_loss))
        numbers = training.train_step(model, batches_of(step), optimizer, objective)
        curve.losses.append(numbers["loss"].item())
        curve.norms.append(numbers["grad_norm"].item())
    return curve


def visit_gradients(model: training.Prepared, batches: list[Batch], visit: Callable[[str, torch.Tensor], None]) -> None:
    """Give `visit` the name and the whole gradient of each parameter of this rank, as the optimizer would use them.

    The weights stay as they are. Every rank must call it: sharded gradients are gathered, one at a time.
    """

    class Visitor(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for name, parameter in model.module.named_parameters():
                if (gradient := parameter.grad) is not None:
                    visit(name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)

    visitor = Visitor(model.module.parameters(), lr=0.0)
    visitor.param_groups[0]["fused"] = False
    training.train_step(replace(model, settings=replace(model.settings, max_grad_norm=0.0)), batches, visitor)


def differing_replicas(model: nn.Module) -> list[str]:
    """Return the names of parameters of which two ranks hold the same part with different bits."""
    mine = {}
    for name, parameter in model.named_parameters():
        where: tuple[Any, ...] = ()
        local = parameter.detach()
        if isinstance(parameter, DTensor):
            mesh, local = parameter.device_mesh, parameter.to_local().detach()
            where = tuple(
                mesh.get_local_rank(dim) for dim, place in enumerate(parameter.placements) if not place.is_replicate()
            )
        content = local.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        mine[f"{name} {where}"] = hashlib.sha256(content).hexdigest()
    everyone = all_gather_json(mine)
    different = {
        part.partition(" ")[0]
        for part, digest in mine.items()
        if any(other.get(part, digest) != digest for other in everyone)
    }
    return sorted(different)


def relative(value: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """||value - expected|| over ||expected||, or over `floor` where that is more; absolute where both are zero."""
    scale = max(expected.double().norm().item(), floor)
    return (value - expected).double().norm().item() / (scale if scale > 0 else 1.0)


def worst_difference(values: list[float], expected: list[float]) -> float:
    """Return the largest |value - expected| / |expected| in the first COMPARED_STEPS of two curves.

    Infinite where one curve has more steps, or a value that is not finite in any step.
    """
    if len(values) != len(expected) or not all(map(math.isfinite, [*values, *expected])):
        return math.inf
    pairs = zip(values[:COMPARED_STEPS], expected[:COMPARED_STEPS], strict=True)
    return max((abs(value - want) / abs(want) for value, want in pairs), default=0.0)


def compute_in_float64(model: nn.Module) -> None:
    """Let a float64 model compute everything in float64, in place.

    transformers casts to float32 within norms, rotary embeddings and routers, for the sake of bfloat16; the rounding
    of that would drown a comparison of float64. torch's grouped products of experts have no float64.
    """
    if any(getattr(module, "num_experts", None) for module in model.modules()):
        model.set_experts_implementation("eager")  # type: ignore[operator]
    for module in model.modules():
        own = type(module).__module__.startswith("torch.")
        if not own and not list(module.children()) and "forward" not in vars(module):
            module.forward = types.MethodType(_forward_in_float64, module)


def _forward_in_float64(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _NoFloat32():
        return type(self).forward(self, *args, **kwargs)


class _NoFloat32(TorchFunctionMode):
    """Every request for float32 gives float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
