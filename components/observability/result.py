"""result.json: how a run ended, in numbers that a sweep or a script can read."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(kw_only=True, slots=True)
class Result:
    """The last word on a run."""

    status: str
    """ok, preempted, interrupted; the launcher writes invalid, failed and oom."""
    steps: int
    """Optimizer steps done."""
    mesh: str
    """The mesh, axis by axis."""
    processes: int
    """Number of processes."""
    wall_seconds: float
    """From the start of the recipe's main to its end."""
    peak_memory_bytes: int
    """Highest memory of rank 0: allocated on the GPU, resident in host memory on a CPU."""
    tokens_per_second: float | None = None
    """Target tokens per second over all ranks, the first step left out."""
    first_loss: float | None = None
    """Loss of the first step."""
    last_loss: float | None = None
    """Loss of the last step."""
    eval_loss: float | None = None
    """Held-out loss at the end."""
    first_eval_loss: float | None = None
    """Held-out loss before the first step."""
    skipped_steps: int = 0
    """Steps whose update was skipped because gradients were not finite."""


def write_result(run_dir: str, result: Result) -> None:
    """Write RUN_DIR/result.json in one rename."""
    target = Path(run_dir) / "result.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(result), indent=2) + "\n")
    temporary.replace(target)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest memory so far of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
