"""Parts of the tests that train on a mesh and compare the curve with plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from components import data, training
from components.config.schema import AdamWConfig
from components.planning.parity_reference import balance_loss

CLIP = 1.0

DDP2: dict[str, Any] = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}
FSDP2: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": -1}
HSDP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": 2}
TP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "tp": 2}
CP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "cp": 2}
PP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2}
EP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2}


class PadOnlyTokenizer:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


@dataclass
class Curve:
    """Results of each step, full gradients of the first, and held-out results at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """On a mesh only; not compared."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    held_out: tuple[float, ...] = ()


LossOf = Callable[[int], tuple[torch.Tensor, float | None]]
"""Step -> loss and metric."""


def plain_curve(model: Any, loss_of: LossOf, steps: int, lr: float) -> Curve:
    """Train in plain PyTorch, in place."""
    curve, trained = Curve(), {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in trained.values() if p.dim() >= 2]
    others = [p for p in trained.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95)
    )
    for step in range(steps):
        loss, metric = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            curve.gradients = {name: p.grad.clone() for name, p in trained.items()}
        norm = torch.stack([p.grad.double().square().sum() for p in trained.values()]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(trained.values(), CLIP, norm.to(loss.dtype))
        optimizer.step()
        curve.losses.append(loss.item())
        curve.norms.append(float(norm))
        curve.metrics += [] if metric is None else [metric]
    return curve


def curve_on_mesh(
    prepared: training.Prepared, objective: Any, batches: data.TrainBatches, steps: int, lr: float, metric: str = ""
) -> Curve:
    """Train a prepared model, with the metric of this name in the results of a step. A collective."""
    curve = Curve()
    optimizer = training.build_optimizer(prepared, AdamWConfig(lr=lr, weight_decay=0.1, betas=[0.9, 0.95]))
    gradients = keep_first_gradients(optimizer, prepared.module)
    for step in range(steps):
        numbers = training.train_step(prepared, batches.at(step), optimizer, objective)
        curve.losses.append(numbers["loss"].item())
        curve.norms.append(numbers["grad_norm"].item())
        curve.metrics += [numbers[metric].item()] if metric else []
        curve.tokens.append(numbers["tokens"].item())
    curve.gradients = unclipped(gradients, curve.norms[0], CLIP)
    return curve


def differences(got: Curve, reference: Curve, bound: float = 1e-10) -> list[str]:
    problems = []
    for name in ("losses", "norms", "metrics", "held_out"):
        if getattr(got, name) != pytest.approx(getattr(reference, name), rel=bound):
            problems.append(f"{name} {getattr(got, name)}, not {getattr(reference, name)}")
    for name, gradient in got.gradients.items():
        error = (gradient - reference.gradients[name]).norm() / reference.norms[0]
        if not error < bound:
            problems.append(f"gradient of {name} is off by {error:.1e}")
    return problems


def plan_of(mesh: Any, global_batch: int, micro_batch: int) -> data.BatchPlan:
    """Return the batches of this rank, with rows padded to a length that cp and sequence parallel can divide."""
    return data.BatchPlan(
        global_batch_size=global_batch,
        micro_batch_size=micro_batch,
        dp_rank=mesh.rank("dp"),
        dp_size=mesh.size("dp"),
        padding=data.Padding(multiple=mesh.sequence_multiple),
    )


def keep_first_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a dict that the first optimizer step fills with the whole, clipped gradients of this rank's parameters."""
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            for name, parameter in model.named_parameters():
                if (grad := parameter.grad) is not None:
                    gradients[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()

    optimizer.register_step_pre_hook(keep)
    return gradients


def unclipped(gradients: dict[str, torch.Tensor], norm: float, max_norm: float) -> dict[str, torch.Tensor]:
    """Return gradients as they were before clipping to `max_norm`, given their norm then."""
    scale = min(1.0, max_norm / (norm + 1e-6))
    return {name: gradient / scale for name, gradient in gradients.items()}


def mean_balance(model: Any, examples: Sequence[data.Example]) -> torch.Tensor:
    """Auxiliary loss of the routers in one process: the mean over target tokens of that of each sample."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for example in examples:
        output = model(input_ids=torch.tensor([example.input_ids]), use_cache=False, output_router_logits=True)
        count = sum(label >= 0 for label in example.labels)
        total = total + count * balance_loss(output.router_logits, model.config.num_experts_per_tok)
        targets += count
    return total / targets
