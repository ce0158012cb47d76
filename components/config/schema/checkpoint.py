"""`checkpoint`: what is kept of a run."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.schema.checks import at_least, raise_all


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When the state is saved, how many saves are kept, and the final export."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: only at the end of the run or when it is told to stop."""
    every_minutes: float = 0
    """Minutes after which one is saved besides, which goes as soon as a newer one is complete; 0: none."""
    last: bool = True
    """Save after the last step. A run that is told to stop before it always saves."""
    keep: int = 2
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of it are kept for good; 0: none."""
    keep_best: bool = False
    """The one with the lowest evaluation loss is kept too."""
    async_save: bool = False
    """Write in the background: training stops for a copy of each rank's state only. Costs host memory of that size."""
    export: bool = True
    """At the end, write export/: a folder that transformers loads."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("checkpoint.every", self.every, 0),
            *at_least("checkpoint.every_minutes", self.every_minutes, 0),
            *at_least("checkpoint.keep", self.keep, 1),
            *at_least("checkpoint.keep_every", self.keep_every, 0),
        ]
        if self.keep_every > 0 and (self.every <= 0 or self.keep_every % self.every):
            problems.append(
                f"checkpoint.keep_every={self.keep_every}: must be a multiple of checkpoint.every={self.every}, the "
                "steps that are saved; change checkpoint.keep_every or checkpoint.every"
            )
        raise_all(problems)
