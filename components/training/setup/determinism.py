"""Deterministic kernels (run.deterministic)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NOTE = (
    "deterministic: torch selects deterministic kernels; runs on the same mesh, devices and versions are bit-equal, "
    "and an operator without such a kernel ends the run"
)
"""Line of the banner."""
_TORCH_MESSAGE = "does not have a deterministic implementation"


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Context in which torch and cuDNN run deterministic kernels, or raise if an operator has none.

    torch would also fill memory that is not initialized, which costs a pass over each new tensor and would only
    matter to code that reads such memory.

    Raises RuntimeError, with the key to change, where torch's message names only its own function.
    """
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    flags = (cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory)
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
        yield
    except RuntimeError as error:
        if _TORCH_MESSAGE not in str(error):
            raise
        operator = str(error).partition(f" {_TORCH_MESSAGE}")[0]
        raise RuntimeError(
            f"run.deterministic=true: {operator} has no deterministic kernel; set run.deterministic=false, or avoid "
            "the operator"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = flags
