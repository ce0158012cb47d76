"""`checkpoint`: what is kept of a run."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.schema.checks import at_least, raise_all


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When the state is saved, how many saves are kept, and the final export."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: only at the end of the run or when it is told to stop."""
    last: bool = True
    """Save after the last step. A run that is told to stop before it always saves."""
    keep: int = 2
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""
    async_save: bool = False
    """Write in the background while training goes on."""
    export: bool = True
    """At the end, write export/: a folder that transformers loads."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("checkpoint.every", self.every, 0),
            *at_least("checkpoint.keep", self.keep, 1),
        ]
        if self.async_save:
            problems.append("checkpoint.async_save=true: not built yet; set checkpoint.async_save=false")
        raise_all(problems)
