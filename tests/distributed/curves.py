"""Parts of the tests that train on a mesh and compare the curve with plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from components import data
from components.planning.parity_reference import balance_loss

DDP2: dict[str, Any] = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}
FSDP2: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": -1}
HSDP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": 2}
TP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "tp": 2}
CP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "cp": 2}
PP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2}
EP: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2}


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
