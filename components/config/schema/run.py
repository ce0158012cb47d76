"""`run`: the identity of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from components.config.schema.checks import raise_all, within

DEFINING_KEYS = (
    "run.seed", "training.global_batch_size", "training.seq_len", "model.path", "model.config", "data",
    "peft.method", "peft.rank", "peft.alpha", "peft.targets", "peft.rslora", "peft.dora",
)  # fmt: skip
"""Keys, and one whole section, whose change makes another run of one that goes on."""
HARMLESS_KEYS = ("data.cache", "data.unused_keys")
"""Keys within that section whose change does not."""


def is_defining(key: str) -> bool:
    """Whether a change of `key` makes another run of one that goes on."""
    return key not in HARMLESS_KEYS and any(
        key == defining or key.startswith(f"{defining}.") for defining in DEFINING_KEYS
    )


def accepts(accepted: Collection[str], key: str) -> bool:
    """Whether a change of `key` is accepted by itself, or with its whole section."""
    return key in accepted or key.partition(".")[0] in accepted


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
    private: bool = False
    """New files are for their owner only (umask 077); false: the user's umask decides. Either way only the owner reads
    what holds samples, the environment or addresses of ranks: logs, environment.json, job.sbatch."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys, or `data` as a whole, that may differ from what the run began with although that makes it another run."""
    allow_env: list[str] = field(default_factory=list)
    """Environment variables whose values may be written to the run directory where ${oc.env:NAME} brings them here."""

    def __post_init__(self) -> None:
        problems = within("run.seed", self.seed, 0, 2**32 - 1)
        if not self.resume:
            problems.append("run.resume='': must be auto, never or the path of a checkpoint")
        if self.dir is not None and not self.dir.strip():
            problems.append("run.dir='': must be a path, or null for a new directory under outputs/")
        if self.name is not None and not (self.name.strip() and self.name.isprintable()):
            problems.append(f"run.name={self.name!r}: must be printable text on one line")
        problems += [
            f"run.accept_changes=[{key}]: may name {', '.join(DEFINING_KEYS)} and keys within; others may change anyway"
            for key in self.accept_changes
            if not is_defining(key)
        ]
        raise_all(problems)
