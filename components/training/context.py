"""What a run is to the code that it calls: mesh, device, directory, batches, progress and stop requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from components.data.batches import BatchPlan

if TYPE_CHECKING:
    import torch

    from components.config.schema.data import DataConfig
    from components.distributed.mesh import Mesh


@dataclass(frozen=True)
class RunContext:
    """What preparation, objectives, evaluation, generation and benchmark tasks need of a run.

    A recipe's run is one, and prints and shows progress. One that is built directly, as by comparisons of meshes and by
    simulations, prints nothing and is never stopped.
    """

    mesh: Mesh
    """The device mesh."""
    device: torch.device
    """This rank's device."""
    rank: int = 0
    """Global rank."""
    dir: str = ""
    """The run directory."""
    plan: BatchPlan = field(default_factory=lambda: BatchPlan(global_batch_size=1, micro_batch_size=1))
    """Assignment of the rows of a batch to dp ranks and micro-batches; by default one row of a single dp rank."""
    resume_from: Path | None = None
    """Checkpoint to load weights from; None if there is none."""
    data: DataConfig | None = None
    """Data section of the config; its system message precedes each of generation.prompts."""

    def print(self, *lines: str) -> None:
        """Print lines on rank 0."""

    def status(self, activity: str, total: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Return a context that shows a progress bar of `activity`, such as "evaluating", with `total` parts.

        It yields a function that advances the bar by one part. Nothing is shown unless the output is a terminal.
        """
        return nullcontext(lambda: None)

    def agreed_to_stop(self) -> bool:
        """Return whether any rank has a stop request. A collective, for loops other than the training loop."""
        return False

    def report_generations(self, generations: list[tuple[str, str]]) -> None:
        """Print (prompt, answer) pairs on rank 0."""

    def report_tool_calls(self, shares: Mapping[str, float], answers: int) -> None:
        """Log the shares of generated answers with the right tool calls."""
