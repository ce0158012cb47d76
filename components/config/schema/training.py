"""`training`, `evaluation` and `generation`: the loop's sizes and its policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from components.config.schema.checks import above, at_least, raise_all

LONGEST_STEP = 31_536_000.0
"""Seconds of a year."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Sizes of an optimizer step, and when the loop logs and evaluates. Sizes are counted in sequences."""

    max_steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch_size: int = 16
    """Sequences per optimizer step, over all processes."""
    micro_batch_size: int = 4
    """Sequences per forward of one process, at most: a run takes the largest number that divides its share of the
    global batch and leaves its pipeline schedule enough of them; accumulation = global / (micro x dp)."""
    seq_len: int = 256
    """Longest sequence in tokens; longer samples are cut."""
    log_every: int = 1
    """Optimizer steps between log lines."""
    eval_every: int = 20
    """Optimizer steps between evaluations; 0: only at the start and the end."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0: no clipping."""
    stop_after_skipped: int = 10
    """End the run when the gradients of so many steps in a row were not finite, and so not applied; 0: never."""
    gc_every: int = 50
    """Optimizer steps between collections of Python's garbage, none of which falls into a step; 0: Python decides."""
    step_timeout_seconds: float = 600.0
    """End the run when no process makes progress for so long, twice as long around the first steps; 0: never."""

    def __post_init__(self) -> None:
        raise_all(
            [
                *at_least("training.max_steps", self.max_steps, 1),
                *at_least("training.global_batch_size", self.global_batch_size, 1),
                *at_least("training.micro_batch_size", self.micro_batch_size, 1),
                *at_least("training.seq_len", self.seq_len, 2),
                *at_least("training.log_every", self.log_every, 1),
                *at_least("training.eval_every", self.eval_every, 0),
                *at_least("training.max_grad_norm", self.max_grad_norm, 0),
                *at_least("training.stop_after_skipped", self.stop_after_skipped, 0),
                *at_least("training.gc_every", self.gc_every, 0),
                *_timeout_problems("training", self.step_timeout_seconds),
            ]
        )


def _timeout_problems(section: str, seconds: float) -> list[str]:
    if seconds == 0 or 1 <= seconds <= LONGEST_STEP:
        return []
    return [
        f"{section}.step_timeout_seconds={seconds}: must be 0 (wait for ever) or at least 1, and at most "
        f"{LONGEST_STEP:g}, a year"
    ]


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """What `recipes/evaluate.py` measures."""

    checkpoint: str | None = None
    """A checkpoint of a run (.../checkpoints/step_N) whose weights replace the model's; null: the model as it is."""
    micro_batch_size: int = 8
    """Sequences per forward of one process."""
    seq_len: int = 256
    """Longest sequence in tokens; longer samples are cut."""
    step_timeout_seconds: float = 600.0
    """End the run when no process makes progress for twice as long; 0: never. Each forward is progress."""

    def __post_init__(self) -> None:
        raise_all(
            [
                *at_least("evaluation.micro_batch_size", self.micro_batch_size, 1),
                *at_least("evaluation.seq_len", self.seq_len, 2),
                *_timeout_problems("evaluation", self.step_timeout_seconds),
            ]
        )


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """Sample texts shown before and after training."""

    samples: int = 1
    """How many prompts of the held-out set are answered; 0: none."""
    max_new_tokens: int = 48
    """Longest answer in tokens."""
    prompts: list[str] = field(default_factory=list)
    """Own prompts, answered besides those of the held-out set."""

    def __post_init__(self) -> None:
        raise_all(
            [
                *at_least("generation.samples", self.samples, 0),
                *above("generation.max_new_tokens", self.max_new_tokens, 0),
            ]
        )
