"""`run`: the identity of a run."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.schema.checks import raise_all, within


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Where a run lives, what it is called, and whether it continues an earlier one."""

    dir: str | None = None
    """Run directory; null: outputs/<recipe>/<time>-<hex>, chosen once by the launching process."""
    name: str | None = None
    """Display name in logs and wandb; null: the run directory's name."""
    seed: int = 42
    """Seed of initialisation, sample order and dropout."""
    resume: str = "auto"
    """auto: continue the newest complete checkpoint of run.dir; never: start over; or a checkpoint's path."""

    def __post_init__(self) -> None:
        problems = within("run.seed", self.seed, 0, 2**32 - 1)
        if not self.resume:
            problems.append("run.resume='': must be auto, never or the path of a checkpoint")
        if self.dir is not None and not self.dir.strip():
            problems.append("run.dir='': must be a path, or null for a new directory under outputs/")
        if self.name is not None and not (self.name.strip() and self.name.isprintable()):
            problems.append(f"run.name={self.name!r}: must be printable text on one line")
        raise_all(problems)
