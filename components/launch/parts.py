"""The two functions of other parts that launch calls.

By name at run time, because parts do not import one another: the data check needs no torch, and the exchange needs
it, in processes that are ranks already and load it anyway. A launcher and a login node never call the second.
"""

from __future__ import annotations

import importlib

from components.config.schema.data import DataConfig


def check_files(data: DataConfig) -> list[str]:
    """Return what is wrong with the local files that the data section names."""
    return importlib.import_module("components.data.preflight").check_files(data)


def exchange_text_from_rank_zero(text: str | None) -> str:
    """Return rank 0's text on every rank that the user's launcher started."""
    return importlib.import_module("components.distributed.process_group").exchange_text_from_rank_zero(text)
