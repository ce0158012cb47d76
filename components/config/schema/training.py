"""`training`, `evaluation` and `generation`: batch sizes, intervals and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from components.config.schema.checks import above, at_least, raise_all

LONGEST_STEP = 31_536_000.0
"""Upper bound of step timeouts: a year, in seconds."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Batch sizes, number of steps, and the intervals of logging and evaluation. Batch sizes count sequences (pairs in
    DPO); with data.pack they count packed rows."""

    max_steps: int = 100
    """Number of optimizer steps of the whole run, at least 1."""
    global_batch_size: int = 16
    """Sequences per optimizer step over all processes; must be a multiple of the data-parallel size dp."""
    micro_batch_size: int = 4
    """Upper bound of the sequences per forward pass of one process. The run uses the largest size up to it that divides
    global_batch_size / dp and gives the pipeline schedule enough micro-batches. Gradient accumulation steps =
    global_batch_size / (micro-batch size x dp). Affects speed and memory, not results."""
    seq_len: int = 256
    """Maximum sequence length in tokens, at least 2; data.overlong decides what happens to longer samples."""
    log_every: int = 1
    """Optimizer steps between log lines."""
    eval_every: int = 20
    """Optimizer steps between evaluations on the held-out split; 0: evaluate only at the start and the end."""
    max_grad_norm: float = 1.0
    """Clip gradients to this global L2 norm; 0: no clipping."""
    stop_after_skipped: int = 10
    """Fail the run after this many consecutive steps whose gradients were not finite; such steps leave the weights
    unchanged. 0: never."""
    gc_every: int = 50
    """Optimizer steps between runs of Python's garbage collector, on all ranks at the same step and never within a
    step; 0: leave it to Python."""
    step_timeout_seconds: float = 600.0
    """Seconds without progress of any process after which the run fails as hung; doubled around the first steps. 0
    (never) or 1 to a year."""

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
        f"{section}.step_timeout_seconds={seconds}: must be 0 (never time out) or at least 1, and at most "
        f"{LONGEST_STEP:g}, a year"
    ]


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Checkpoint and sizes of `recipes/evaluate.py`."""

    checkpoint: str | None = None
    """Checkpoint (RUN_DIR/checkpoints/step_N) whose weights to evaluate; null: the weights of model.path."""
    micro_batch_size: int = 8
    """Sequences per forward pass of one process, at least 1."""
    seq_len: int = 256
    """Maximum sequence length in tokens, at least 2; data.overlong decides what happens to longer samples."""
    step_timeout_seconds: float = 600.0
    """The run fails as hung after twice this many seconds in which no process completes a forward pass; 0 (never) or 1
    to a year."""

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
    """Texts generated greedily and printed before and after training."""

    samples: int = 1
    """Number of held-out prompts to generate an answer for; 0: none."""
    max_new_tokens: int = 48
    """Maximum length of a generated answer in tokens, greater than 0."""
    prompts: list[str] = field(default_factory=list)
    """Additional prompts to generate answers for."""

    def __post_init__(self) -> None:
        raise_all(
            [
                *at_least("generation.samples", self.samples, 0),
                *above("generation.max_new_tokens", self.max_new_tokens, 0),
            ]
        )
