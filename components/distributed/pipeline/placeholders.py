"""Parameterless modules that replace modules of other stages in a pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Passthrough(nn.Module):
    """Placeholder for a module of another stage; returns its first argument."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states unchanged: (batch, seq, hidden)."""
        return hidden


class StageInput(nn.Module):
    """Placeholder for the layer before a stage's first one; returns the stage's input.

    The model's forward may transform hidden states before its layers (e.g. scale embeddings). The first stage has done
    so already, and ignoring the argument undoes the repetition on later stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return the hidden states received from the previous stage: (batch, seq, hidden)."""
        return self.received


class StageOutput(nn.Module):
    """Placeholder for the layer after a stage's last one; captures the stage's output.

    The model's forward may transform hidden states after its layers (e.g. a norm without parameters), which only the
    last stage may apply.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Capture the hidden states for the next stage and return them: (batch, seq, hidden)."""
        self.captured = hidden
        return hidden


class ZeroPositions(nn.Module):
    """Placeholder for learned position embeddings, which the first stage has added already."""

    def forward(self, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a scalar zero, which broadcasts to any shape."""
        return torch.zeros((), device=positions.device)
