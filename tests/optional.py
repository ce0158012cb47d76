"""Optional packages that `make install-dev` puts outside site-packages, into the environment's `optional/` folder, and
what old versions of torch lack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from packaging.version import Version

from components.config.schema.parallelism import SPLIT_BACKWARD

Case = TypeVar("Case")
TORCH = Version(torch.__version__).release
SHARDS_BYTES = TORCH >= (2, 12)
"""Whether FSDP2 shards packed 4-bit weights."""


def runnable(cases: Iterable[Case]) -> list[Case]:
    """Return the cases that the installed torch can run: before 2.13, without schedules that split the backward."""
    return [case for case in cases if TORCH >= (2, 13) or not any(name in str(case) for name in SPLIT_BACKWARD)]


def find_optional() -> None:
    """Make optional packages importable.

    torchao is not in site-packages, because transformers imports it at every start if it finds it there.
    """
    optional = str(Path(sys.prefix) / "optional")
    if optional not in sys.path:
        sys.path.append(optional)


def need_torchao() -> None:
    """Make torchao importable, or skip the test."""
    find_optional()
    pytest.importorskip(
        "torchao", reason="needs the extra `quantization`; make install-dev puts it into the folder optional/"
    )


def need_triton() -> None:
    """Make Triton importable, or skip the test. CUDA builds of torch install it; .ci/run adds it to a CPU build."""
    find_optional()
    pytest.importorskip("triton", reason="needs Triton, which is part of torch's CUDA builds")
