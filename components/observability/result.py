"""result.json: how a run ended, as numbers for sweeps and scripts; the summary; peak memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from components.config.schema.parallelism import describe_processes


@dataclass(kw_only=True, slots=True)
class Result:
    """Contents of result.json."""

    status: str
    """ok, preempted or interrupted; the launcher writes invalid, failed, hung, corrupted, oom and cancelled."""
    steps: int
    """Completed optimizer steps."""
    mesh: str
    """Axes of the mesh with their degrees."""
    processes: int
    """Number of processes."""
    wall_seconds: float
    """Seconds from the start of the recipe's main to its end."""
    peak_memory_bytes: int
    """Peak memory of rank 0: allocated on a GPU, resident (RSS) on a CPU."""
    peak_reserved_bytes: int | None = None
    """Peak memory reserved by torch's CUDA allocator on rank 0, which is what runs out; None on a CPU."""
    compute_dtype: str | None = None
    """Dtype of matmuls, as chosen for the device; it limits how closely losses can agree between meshes."""
    tokens_per_second: float | None = None
    """Tokens per second over all ranks, without the first log interval."""
    counted_tokens: str = "target"
    """Tokens that are counted: target; input (all that the model reads) if only the last of a row is a target."""
    mfu: float | None = None
    """Model FLOPs utilization, without the first log interval; None if the peak FLOP/s or the FLOPs are unknown."""
    seconds_to_first_step: float | None = None
    """Seconds from the start of the recipe's main until the loop requests the second batch of this attempt, by when the
    first optimizer step has been launched."""
    data_wait_seconds: float = 0.0
    """Seconds that rank 0 waited for batches."""
    first_loss: float | None = None
    """Loss of the first step."""
    last_loss: float | None = None
    """Loss of the last step."""
    eval_loss: float | None = None
    """Held-out loss at the end."""
    eval_accuracy: float | None = None
    """Held-out accuracy at the end, in [0, 1]; None for objectives without accuracy."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Scores of benchmark tasks (evaluation.tasks) at the end, by TASK/METRIC."""
    first_eval_loss: float | None = None
    """Held-out loss before the first step."""
    stopped_early: bool = False
    """The held-out loss stopped improving (training.early_stop_patience)."""
    skipped_steps: int = 0
    """Steps whose update was skipped because the gradients were not finite."""
    restarts: int = 0
    """Attempts of the run after the first."""
    lost_steps: int = 0
    """Steps taken again after restarts."""
    lost_seconds: float = 0.0
    """Seconds that the restarts took: from each checkpoint resumed from until a step was taken from there."""
    step_seconds: float | None = None
    """Seconds per optimizer step, without the first log interval."""
    planned: dict[str, Any] | None = None
    """Estimates of scripts/plan.py for this run: gpu, peak_memory_bytes of the fullest rank, step_seconds. None if
    cluster.gpu is not set."""


def summary(result: Result, run_dir: Path) -> str:
    """Return the lines printed at the end of a run; each fits into 80 columns, except for long paths."""
    steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
    doing = f"{steps} on "
    if result.last_loss is None and not result.skipped_steps:  # nothing is trained
        doing = "evaluated on " if result.eval_loss is not None or result.tasks else ""
        doing = f"evaluated step {result.steps} on " if result.steps else doing
    first = f"{result.status}: {doing}{describe_processes(result.processes)} in {result.wall_seconds:.0f} s"
    parts = []
    if result.first_loss is not None and result.last_loss is not None:
        parts.append(f"loss {_short(result.first_loss)} to {_short(result.last_loss)}")
    if result.eval_loss is not None:
        before = result.first_eval_loss
        change = f"{_short(before)} to " if before is not None else ""
        share = f" ({(result.eval_loss - before) / before:+.0%})" if before else ""
        parts.append(f"held-out loss {change}{_short(result.eval_loss)}{share}")
    if result.tokens_per_second:
        parts.append(f"{result.tokens_per_second:,.0f} {result.counted_tokens} tokens/s")
    if result.mfu is not None:
        parts.append(f"MFU {result.mfu:.1%}")
    if result.restarts:
        times = f"{result.restarts} restart{'' if result.restarts == 1 else 's'}"
        again = f"{result.lost_steps} step{'' if result.lost_steps == 1 else 's'} taken again"
        parts.append(f"{times}: {again}, {result.lost_seconds:,.0f} s lost")
    peak = f"peak memory {result.peak_memory_bytes / 2**30:.2f} GiB"
    if result.peak_reserved_bytes is not None:
        peak += f" allocated, {result.peak_reserved_bytes / 2**30:.2f} GiB reserved"
    parts.append(peak)
    return "\n".join([first, *(f"  {part}" for part in parts), f"  {run_dir}"])


def _short(loss: float) -> str:
    return f"{loss:.3f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.3g}"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on a GPU, resident (RSS) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak memory in bytes reserved by torch's CUDA allocator; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
