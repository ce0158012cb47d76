"""torch dtypes by name, as used in the config and in messages between ranks."""

from __future__ import annotations

import torch


def torch_dtypes() -> dict[str, torch.dtype]:
    """Return every torch dtype by its name without `torch.`, such as `bfloat16`; aliases are left out."""
    return {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name. Raises KeyError if torch has none."""
    return torch_dtypes()[str(name)]
