"""What stands in a pipeline stage where modules of other stages would be: modules without parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Absent(nn.Module):
    """Stands where another stage's module would be, and returns its first argument."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(batch, seq, hidden) -> the same."""
        return hidden


class Entrance(nn.Module):
    """Stands where the layer before a stage's first would be, and returns what the stage was given.

    So nothing that the forward does before its layers is done to it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return the hidden states that came from the stage before: (batch, seq, hidden)."""
        return self.given


class Exit(nn.Module):
    """Stands where the layer after a stage's last would be, and keeps what the stage gives.

    So nothing that the forward does after its layers is done to it before the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the hidden states for the stage after, (batch, seq, hidden), and return them."""
        self.taken = hidden
        return hidden


class NothingAdded(nn.Module):
    """Stands for learned positions, which the first stage has added already."""

    def forward(self, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a zero that can be added to anything."""
        return torch.zeros((), device=positions.device)
