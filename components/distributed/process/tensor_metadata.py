"""A fixed-size message that describes a value: what a collective must agree on before it moves data.

gloo aborts the process when ranks reduce or gather tensors of different types, and reads garbage when one
rank sends an int and another a float of the same width. So the description travels first, in a vector that
looks the same everywhere. Numbers travel in it whole, as their 64 bits.
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
    """The ranks passed values that do not go together; raised on all of them, with what each one passed."""


@dataclass(frozen=True, slots=True)
class Header:
    """Kind, type and shape of a value; of a number also the number."""

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
        TypeError: not a bool, int, float or tensor.
        OverflowError: an int of more than 64 bits.
    """
    words = [0] * WIDTH
    if isinstance(value, torch.Tensor):
        if value.dim() > WIDTH - _DIMS_AT:
            raise ValueError(f"a tensor of {value.dim()} dims: at most {WIDTH - _DIMS_AT} are supported")
        words[:_DIMS_AT] = [_TENSOR, _dtypes().index(value.dtype), value.dim(), int(value.requires_grad)]
        words[_DIMS_AT : _DIMS_AT + value.dim()] = value.shape
    elif type(value) in _SCALARS:
        words[0] = _SCALARS.index(type(value))
        words[1] = struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)
        if not -(2**63) <= words[1] < 2**63:
            raise OverflowError(f"{value} does not fit into 64 bits")
    else:
        raise TypeError(f"{type(value).__name__}: expected a bool, int, float or tensor")
    return torch.tensor(words, dtype=torch.int64, device=device)


def decode(words: list[int]) -> Header:
    """Return the header that `encode` made, from the vector's elements."""
    if words[0] == _TENSOR:
        shape = tuple(words[_DIMS_AT : _DIMS_AT + words[2]])
        return Header(dtype=_dtypes()[words[1]], shape=shape, requires_grad=bool(words[3]))
    kind = _SCALARS[words[0]]
    bits = struct.unpack("d", struct.pack("q", words[1]))[0] if kind is float else words[1]
    return Header(scalar=kind(bits))


def mismatch(call: str, rule: str, headers: list[Header]) -> MismatchError:
    """Return the error of a call whose values do not go together."""
    passed = "; ".join(f"rank {rank}: {header}" for rank, header in enumerate(headers))
    return MismatchError(f"{call}: {rule}, but {passed} (ranks of the group)")


def _dtypes() -> list[torch.dtype]:
    """All dtypes, in an order that is the same on all ranks."""
    return sorted(set(torch_dtypes().values()), key=str)
