"""Lion (Chen et al. 2023): steps of equal size in every parameter, along the sign of a momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay. Elementwise, so sharded parameters (DTensor) need no extra code."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        """Create the optimizer.

        Args:
            params: Parameters, or parameter groups.
            lr: Learning rate; 3 to 10 times smaller than AdamW's.
            betas: Decay rates of the momentum, in the update and in the state.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step. Meshbook has reduced and clipped the gradients, and set each group's lr by its schedule."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum"], parameter.grad
                update = momentum.lerp(gradient, 1 - first).sign_()
                momentum.lerp_(gradient, 1 - second)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
