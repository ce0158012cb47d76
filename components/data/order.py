"""Shuffled sample orders as pure functions of (seed, position), independent of the world size."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from components.protocol.errors import ConfigError

_ROUNDS = 8
_MIN_HALF_BITS = 3  # smaller domains bias the permutations of a few samples
_UINT64 = (1 << 64) - 1


class Order(Protocol):
    """Infinite stream of sample indices, a pure function of (seed, position)."""

    @property
    def size(self) -> int:
        """Samples of an epoch."""
        ...

    @property
    def seed(self) -> int: ...

    def at(self, position: int) -> int:
        """Return the sample index at `position` (0-based, counted over all epochs)."""
        ...

    def indices(self, start: int, count: int) -> list[int]:
        """Return the sample indices at `count` positions from `start`."""
        ...


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


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Infinite stream of sample indices whose neighbors are close together on disk: one block shuffle per epoch.

    Samples form blocks of `block` consecutive ones. Each epoch permutes the blocks, takes `window` of them at a time,
    and permutes the samples within each window. So `window` x `block` positions read from `window` sequential pieces of
    the data. Both permutations are those of `SampleOrder`: any position costs microseconds and no memory. Blocks of one
    sample, or a window that spans all blocks, shuffle everything.

    The last block may be shorter. Its place in the permutation is drawn separately, so that the start of every block is
    a product.
    """

    size: int
    """Number of samples in the dataset, at least 1."""
    seed: int
    """Any integer; equal seeds give equal streams."""
    block: int
    """Samples of a block, at least 1."""
    window: int
    """Blocks of a window, at least 1."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a dataset of {self.size} samples cannot be shuffled; it needs at least one sample")

    def at(self, position: int) -> int:
        """Return the sample index at `position` of the stream (0-based, counted over all epochs)."""
        epoch, offset = divmod(position, self.size)
        if self.block == 1:
            return _permuted(offset, self.size, _round_keys(self.seed, epoch))
        full, rest = divmod(self.size, self.block)  # blocks of full length, samples of the shorter last block
        # Number of the place of the shorter block among all blocks; without one, a place after all blocks.
        short = _draw(full + 1, self.seed, f"{epoch}:short") if rest else full
        window = self._place_of(offset, short, rest)[0] // self.window
        start = self._start_of(window * self.window, short, rest)
        stop = min(self._start_of((window + 1) * self.window, short, rest), self.size)
        within = _permuted(offset - start, stop - start, _round_keys(self.seed, f"{epoch}:{window}"))
        place, sample = self._place_of(start + within, short, rest)
        if place == short and rest:
            return full * self.block + sample
        number = place - (place > short)
        return _permuted(number, full, _round_keys(self.seed, f"{epoch}:blocks")) * self.block + sample

    def indices(self, start: int, count: int) -> list[int]:
        """Return the sample indices at `count` positions from `start`; the range may cross epoch boundaries."""
        return [self.at(position) for position in range(start, start + count)]

    def _start_of(self, place: int, short: int, rest: int) -> int:
        """Return the offset in the epoch at which the block at `place` of the permutation starts."""
        return place * self.block if place <= short else (place - 1) * self.block + rest

    def _place_of(self, offset: int, short: int, rest: int) -> tuple[int, int]:
        """Return the place of the block at `offset` of the epoch, and the sample within the block."""
        before = short * self.block
        if offset < before:
            return divmod(offset, self.block)
        if offset < before + rest:
            return short, offset - before
        place, sample = divmod(offset - before - rest, self.block)
        return short + (rest > 0) + place, sample


def _draw(count: int, seed: int, text: str) -> int:
    """Return a pseudorandom number below `count`."""
    return int.from_bytes(blake2b(f"{seed}:{text}".encode(), digest_size=16).digest(), "big") % count


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


def _round_keys(seed: int, epoch: int | str) -> tuple[int, ...]:
    digest = blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return struct.unpack(f"<{_ROUNDS}Q", digest)
