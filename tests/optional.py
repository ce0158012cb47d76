"""Packages that tests use and that stand apart from the environment: see the Makefile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def need_torchao() -> None:
    """Make torchao importable, or skip: transformers imports it at each start wherever it is installed."""
    apart = str(Path(sys.prefix) / "optional")
    if apart not in sys.path:
        sys.path.append(apart)
    pytest.importorskip(
        "torchao", reason="the extra quantization; make install puts it into the environment's optional/"
    )
