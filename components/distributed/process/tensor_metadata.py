"""Fixed-size header with kind, dtype and shape of a value, exchanged before a collective on the value.

gloo aborts the process if ranks pass tensors of different dtypes, and reads garbage if one rank sends an int and
another a float of the same width. Ranks therefore exchange headers first: int64 vectors of the same size on all ranks.
A number is contained in its header, as 64 bits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from components.dtypes import torch_dtypes

Scalar = bool | int | float

WIDTH = 16
_DIMS_AT = 4
_SCALARS: tuple[type, ...] = (bool, int, float)
_TENSOR = len(_SCALARS)


class MismatchError(ValueError):
    """Mismatch of the values that ranks passed to a collective; raised on all ranks, with the value of each."""


@dataclass(frozen=True, slots=True)
class Header:
    """Dtype and shape of a tensor, or a number with its type."""

    scalar: Scalar | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False

    def __str__(self) -> str:
        if self.scalar is not None:
            return f"the {type(self.scalar).__name__} {self.scalar}"
        name = str(self.dtype).removeprefix("torch.")
        return f"a {name} tensor of shape {list(self.shape)}" + (" with gradient" if self.requires_grad else "")


def encode(value: Scalar | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the header of `value` as an int64 vector on `device`.

    Raises:
        TypeError: `value` is not a bool, int, float or tensor.
        OverflowError: `value` is an int of more than 64 bits.
        ValueError: `value` is a tensor with more dims than the header has room for.
    """
    fields = [0] * WIDTH
    if isinstance(value, torch.Tensor):
        if value.dim() > WIDTH - _DIMS_AT:
            raise ValueError(f"a tensor of {value.dim()} dims: at most {WIDTH - _DIMS_AT} are supported")
        fields[:_DIMS_AT] = [_TENSOR, _dtypes().index(value.dtype), value.dim(), int(value.requires_grad)]
        fields[_DIMS_AT : _DIMS_AT + value.dim()] = value.shape
    elif type(value) in _SCALARS:
        fields[0] = _SCALARS.index(type(value))
        fields[1] = struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)
        if not -(2**63) <= fields[1] < 2**63:
            raise OverflowError(f"{value} does not fit into 64 bits")
    else:
        raise TypeError(f"{type(value).__name__}: expected a bool, int, float or tensor")
    return torch.tensor(fields, dtype=torch.int64, device=device)


def decode(fields: list[int]) -> Header:
    """Return the header from the elements of a vector of `encode`."""
    if fields[0] == _TENSOR:
        shape = tuple(fields[_DIMS_AT : _DIMS_AT + fields[2]])
        return Header(dtype=_dtypes()[fields[1]], shape=shape, requires_grad=bool(fields[3]))
    kind = _SCALARS[fields[0]]
    bits = struct.unpack("d", struct.pack("q", fields[1]))[0] if kind is float else fields[1]
    return Header(scalar=kind(bits))


def mismatch(call: str, rule: str, headers: list[Header]) -> MismatchError:
    """Return the error for a call whose headers, in rank order, break `rule`."""
    passed = "; ".join(f"rank {rank}: {header}" for rank, header in enumerate(headers))
    return MismatchError(f"{call}: {rule}, but {passed} (ranks of the group)")


def _dtypes() -> list[torch.dtype]:
    """Return all dtypes in an order that is the same on all ranks."""
    return sorted(set(torch_dtypes().values()), key=str)
