"""The functions of other parts that launch calls.

By name at run time, because parts do not import one another: the checks of data need no torch, and the exchange
needs it, in processes that are ranks already and load it anyway. A launcher and a login node never call that one.
"""

from __future__ import annotations

import importlib

from components.config.schema.data import DataConfig


def check_files(data: DataConfig) -> list[str]:
    """Return what is wrong with the local files that the data section names."""
    return importlib.import_module("components.data.preflight").check_files(data)


def is_local_data(path: str) -> bool:
    """Return whether a path of the data section is a file or folder of this machine, else a hub name."""
    return importlib.import_module("components.data.files").is_local(path)


def exchange_text_from_rank_zero(text: str | None) -> str:
    """Return rank 0's text on every rank that the user's launcher started."""
    return importlib.import_module("components.distributed.process_group").exchange_text_from_rank_zero(text)
