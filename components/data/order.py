"""Shuffled sample order as a pure function of (seed, position), independent of the world size."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

from components.config.errors import ConfigError

_ROUNDS = 8
_MIN_HALF_BITS = 3  # smaller domains bias the permutations of a few samples
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Infinite stream of sample indices: one shuffle of all `size` samples per epoch.

    Each epoch is a keyed pseudorandom permutation that is computed index by index: a Feistel network over the
    next power of four, iterated until the index is below `size` (cycle walking; Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002). Any position costs about ten microseconds and no memory. A stored
    permutation (numpy's) of 1e8 indices takes 0.8 GB and seconds, in every process, at every epoch and every
    resume.
    """

    size: int
    """Number of samples in the dataset, at least 1."""
    seed: int
    """Any integer; equal seeds give equal streams."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a dataset of {self.size} samples cannot be shuffled; it needs at least one sample")

    def at(self, position: int) -> int:
        """Return the sample index at `position` of the stream (0-based, counted over all epochs)."""
        epoch, offset = divmod(position, self.size)
        return _permuted(offset, self.size, _round_keys(self.seed, epoch))

    def indices(self, start: int, count: int) -> list[int]:
        """Return the sample indices at `count` positions from `start`; the range may cross epoch boundaries."""
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
