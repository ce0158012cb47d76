"""`run`: directory, name, seed and resume policy of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from components.config.schema.checks import raise_all, within
from components.storage.urls import is_url

DEFINING_KEYS = (
    "run.seed", "training.global_batch_size", "training.batch_size_ramp", "training.seq_len",
    "training.seq_len_ramp",
    "model.path", "model.config", "model.rope", "data",
    "peft.method", "peft.rank", "peft.alpha", "peft.targets", "peft.target_parameters",
    "peft.rslora", "peft.dora",
)  # fmt: skip
"""Keys, and the section `data`, that define the experiment; a resume that changes one is rejected."""
HARMLESS_KEYS = ("data.cache", "data.cache_gib", "data.unused_keys")
"""Keys within `data` that may change on resume."""


def is_defining(key: str) -> bool:
    """Return whether a change of `key` makes a resumed run a different experiment."""
    return key not in HARMLESS_KEYS and any(
        key == defining or key.startswith(f"{defining}.") for defining in DEFINING_KEYS
    )


def accepts(accepted: Collection[str], key: str) -> bool:
    """Return whether `accepted` (run.accept_changes) lists `key` or its section."""
    return key in accepted or key.partition(".")[0] in accepted


def is_same_checkpoint(earlier: object, resume: str) -> bool:
    """Return whether two values of run.resume name the same checkpoint; "auto" and "never" name none."""
    if earlier in (None, "auto", "never"):
        return False
    return Path(str(earlier)).expanduser().resolve() == Path(resume).expanduser().resolve()


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Run directory, name, seed and resume policy."""

    dir: str | None = None
    """Run directory; null: outputs/<recipe>/<time>-<hex>, chosen once by the launching process. If it already
    holds a run, `resume` decides."""
    name: str | None = None
    """Name of the Slurm job; null: name of the recipe."""
    seed: int = 42
    """Seed of weight initialization, sample order and dropout, in [0, 2**32 - 1]."""
    deterministic: bool = False
    """true: use deterministic kernels only, so that runs on the same mesh and devices are bit-equal; slower on GPUs. An
    operator without such a kernel ends the run."""
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint in run.dir, if any; never: start from step 0, in a run.dir
    without checkpoints; or the path of a checkpoint to resume from. A start that is interrupted continues from its own
    newest checkpoint when it is requeued or restarted."""
    private: bool = False
    """true: create all files readable by the owner only (umask 077); false: use the umask of the user. Files that hold
    samples, environment variables or addresses (logs, environment.json, job.sbatch) are always private."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys that may change on resume although they define the experiment (run.seed, training.global_batch_size,
    training.seq_len, model.path, ...); `data` accepts every change below data."""
    allow_env: list[str] = field(default_factory=list)
    """Environment variables that ${oc.env:NAME} may copy into the config, and so into the run directory."""

    def __post_init__(self) -> None:
        problems = within("run.seed", self.seed, 0, 2**32 - 1)
        if not self.resume:
            problems.append("run.resume='': must be auto, never or the path of a checkpoint")
        if self.dir is not None and not self.dir.strip():
            problems.append("run.dir='': must be a path, or null for a new directory under outputs/")
        if self.dir is not None and is_url(self.dir):
            problems.append(
                f"run.dir={self.dir}: must be a local path; checkpoint.remote copies checkpoints to an object store"
            )
        if self.name is not None and not (self.name.strip() and self.name.isprintable()):
            problems.append(f"run.name={self.name!r}: must be printable text on one line")
        problems += [
            f"run.accept_changes=[{key}]: may name {', '.join(DEFINING_KEYS)} and keys below them; "
            "other keys may always change"
            for key in self.accept_changes
            if not is_defining(key)
        ]
        raise_all(problems)
