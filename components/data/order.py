"""The order of samples: a pure function of (seed, position), whatever the number of processes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

from components.config.errors import ConfigError

_ROUNDS = 8
_MIN_HALF_BITS = 3  # in smaller domains not all orders of a few samples are equally likely
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """An endless stream of sample indices: epoch after epoch, each a shuffle of all `size` samples.

    Each epoch is a keyed pseudorandom permutation that is computed index by index: a Feistel network over the
    next power of four, walked along its cycle until the index is below `size` (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002). So any position, the billionth too, costs some ten microseconds and
    no memory; a stored permutation (numpy's) of 1e8 indices takes 0.8 GB and seconds, in every process, at
    every epoch and every resume.
    """

    size: int
    """Samples of the data set."""
    seed: int
    """Any integer; the same seed gives the same stream."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a data set of {self.size} samples has no order; it needs at least one")

    def at(self, position: int) -> int:
        """Return the index of the sample at `position` (0-based, over all epochs) of the stream."""
        epoch, place = divmod(position, self.size)
        return _permuted(place, self.size, _round_keys(self.seed, epoch))

    def indices(self, start: int, count: int) -> list[int]:
        """Return the indices at `count` positions from `start` on; they may reach over the seam of epochs."""
        return [self.at(position) for position in range(start, start + count)]


def _permuted(index: int, size: int, keys: tuple[int, ...]) -> int:
    half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, keys)
        if index < size:
            return index


def _feistel(index: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half_bits | right


def _mixed(value: int) -> int:
    """Return 64 bits that all depend on `value` (the finalizer of splitmix64, Steele et al. 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _UINT64
    return value ^ value >> 31


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return struct.unpack(f"<{_ROUNDS}Q", digest)
