"""Optional packages that `make install` puts outside site-packages, into the environment's `optional/` folder, and what
old versions of torch lack.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from components.config.rules.compute_rules import qlora_problems
from components.config.schema import ParallelismConfig, PeftConfig

SHARDS_BYTES = not qlora_problems(PeftConfig(method="qlora"), ParallelismConfig())
"""Whether FSDP2 shards packed 4-bit weights; that of torch 2.11 does not."""


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
        "torchao", reason="needs the extra `quantization`; make install puts it into the environment's optional/ folder"
    )


def need_triton() -> None:
    """Make Triton importable, or skip the test. CUDA builds of torch install it; .ci/run adds it to a CPU build."""
    find_optional()
    pytest.importorskip("triton", reason="needs Triton, which is part of torch's CUDA builds")
