"""torch's dtypes by name, as config and ranks exchange them."""

from __future__ import annotations

import torch


def torch_dtypes() -> dict[str, torch.dtype]:
    """Return every dtype of torch by its name without `torch.`, for example `bfloat16`; aliases are left out."""
    return {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises KeyError for a name that torch lacks."""
    return torch_dtypes()[str(name)]
