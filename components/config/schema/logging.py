"""`logging`: what a person sees, and where else it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from components.config.schema.checks import at_least, raise_all


class WandbMode(StrEnum):
    """disabled: wandb is not imported; offline: files only, no account; online: synchronised."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. A failing wandb never stops a run."""

    mode: WandbMode = WandbMode.disabled
    """disabled, offline or online."""
    project: str = "meshbook"
    """Project that the run is filed under."""
    entity: str | None = None
    """Team or user; null: the account's default."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""
    group: str | None = None
    """Runs that are shown together; a sweep sets it for its runs."""


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Console, plot and wandb."""

    comm: bool = False
    """Record the second optimizer step and print what its collectives moved: group, operation, calls, MiB of rank 0."""
    examples: int = 2
    """Decoded training examples shown at the start, with their loss mask."""
    progress: bool = True
    """A progress bar on rank 0's terminal; without a terminal there are plain lines either way."""
    plot: bool = True
    """Write loss.png at the end; needs the extra `plot`, skipped with one line where it is absent."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""

    def __post_init__(self) -> None:
        raise_all(at_least("logging.examples", self.examples, 0))
