"""`checkpoint`: save intervals, retention policy and export."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.schema.checks import at_least, raise_all
from components.storage.urls import is_url, url_problems


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, which checkpoints to keep, and whether to export the model at the end."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: save only at the end of the run or when a stop is requested."""
    every_minutes: float = 0
    """Additionally save when this many minutes have passed since the last save; such a checkpoint is deleted once a
    newer one is complete. 0: never."""
    last: bool = True
    """Save after the last step. A run that receives a stop request earlier always saves."""
    keep: int = 2
    """Number of newest complete checkpoints to keep, at least 1; older ones are deleted after a newer one is
    complete."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this number forever; must be a multiple of every. 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest evaluation loss; every must be a multiple of training.eval_every."""
    async_save: bool = False
    """Write checkpoints in the background: training only waits while each rank copies its state to host memory, which
    takes that much host memory."""
    check_replicas: int = 100
    """Optimizer steps between comparisons of the replicas of weights and optimizer state bit by bit, which find a rank
    that computes wrong numbers without an error; they are also compared before every checkpoint and at the end. Such a
    run ends with exit status 76, names the rank and its host, and saves nothing. 0: never compare."""
    remote: str | None = None
    """URL in an object store (s3://, gs://, az://, hf://) below which each checkpoint and the export are copied; each
    run needs its own without other objects, and a sweep appends the name of each point. keep, keep_every and keep_best
    apply there too. A resumed run whose directory lacks the newest checkpoint copies it back. null: no copies."""
    export: bool = True
    """Export the model to RUN_DIR/export at the end, a folder that transformers loads."""
    export_average: bool = True
    """In a run with training.ema_decay, export the averaged weights; false: the trained weights."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("checkpoint.every", self.every, 0),
            *at_least("checkpoint.every_minutes", self.every_minutes, 0),
            *at_least("checkpoint.keep", self.keep, 1),
            *at_least("checkpoint.check_replicas", self.check_replicas, 0),
            *at_least("checkpoint.keep_every", self.keep_every, 0),
        ]
        problems += url_problems("checkpoint.remote", self.remote)
        if self.remote is not None and not is_url(self.remote):
            problems.append(f"checkpoint.remote={self.remote}: must be a URL such as s3://BUCKET/NAME, or null")
        if self.keep_every > 0 and (self.every <= 0 or self.keep_every % self.every):
            problems.append(
                f"checkpoint.keep_every={self.keep_every}: must be a multiple of checkpoint.every={self.every}, the "
                "interval of saves; change checkpoint.keep_every or checkpoint.every"
            )
        raise_all(problems)
