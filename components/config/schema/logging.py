"""`logging`: what a person sees, and where else it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from components.config.schema.checks import above, at_least, raise_all


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
class ProfileConfig:
    """Traces by torch.profiler of some optimizer steps, in RUN_DIR/profile/; without `enabled` they cost nothing."""

    enabled: bool = False
    """Record a trace."""
    start: int = 10
    """The first step that is recorded, counted from the start or the resume of the run: the first ones also set up."""
    steps: int = 3
    """How many steps are recorded."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record."""
    memory: bool = False
    """Record allocations too."""
    stacks: bool = False
    """Record where in the code operations were called: slower."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("logging.profile.start", self.start, 1),
            *at_least("logging.profile.steps", self.steps, 1),
        ]
        for rank in self.ranks:
            problems += at_least("logging.profile.ranks", rank, 0)
        if self.enabled and not self.ranks:
            problems.append("logging.profile.ranks=[]: nobody would record; name a rank, such as [0]")
        raise_all(problems)


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
    peak_tflops: float | None = None
    """Peak of one device in TFLOP/s, in the type of the run's products, for the MFU; null: that of known GPUs."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Traces of some steps."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""

    def __post_init__(self) -> None:
        problems = at_least("logging.examples", self.examples, 0)
        if self.peak_tflops is not None:
            problems += above("logging.peak_tflops", self.peak_tflops, 0)
        raise_all(problems)
