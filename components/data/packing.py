"""Rows of a dataset: the assignment of samples to rows (packing), and the shuffled order of samples and rows.

Rows are planned from the lengths of samples alone: the same on every rank and for every seed. The planners work on the
number of documents of each length and emit patterns (lengths of one row) with a repeat count, so their
cost grows with the number of distinct lengths rather than documents. Best fit is nearly optimal if lengths spread over
the whole row or a row holds two or three documents. If it leaves more than 0.1 % of the tokens empty, minimum slack,
which is better with many documents per row, runs too and the plan with fewer rows is used.

Shuffled orders are pure functions of (seed, position), independent of the world size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from components.data.dataset import Dataset, ItemSequence
from components.data.examples import PackedRow
from components.protocol.errors import ConfigError

_ROUNDS = 8
_MIN_HALF_BITS = 3  # smaller domains bias the permutations of a few samples
_UINT64 = (1 << 64) - 1
Pattern = tuple[list[int], int]
"""Document lengths of a row, and the number of rows with these lengths."""
_CANDIDATES = 48  # lengths considered to complete a row: subset sums of this many are dense
_KEPT_FREE = 2  # room, in documents of mean length, left for the exact completion of a row
_DOCUMENTS_MULTIPLE = 8  # so that document tensors of train and eval batches mostly have one shape


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


class _RowPlan(NamedTuple):
    """Assignment of documents to rows: row r holds `documents[starts[r] : starts[r + 1]]`."""

    documents: np.ndarray  # (documents,) int64
    starts: np.ndarray  # (rows + 1,) int64


class PackedDataset(ItemSequence[PackedRow]):
    """The samples of a dataset packed into rows of `seq_len` tokens; the same rows on every rank and for every seed.

    The order shuffles rows, and batch sizes count rows. `documents` is the size of per-document tensors: the largest
    number of samples in a row, plus one for the padding, rounded up.
    """

    def __init__(self, samples: Dataset, seq_len: int) -> None:
        self.seq_len = seq_len
        self.prompts = samples.prompts
        self.pad_token_id = samples.pad_token_id
        self._samples = samples
        self._plan = plan_rows(samples.lengths, seq_len)
        max_documents = int(np.diff(self._plan.starts).max())
        self.documents = documents_size(max_documents)
        self.facts = replace(samples.facts, rows=len(self), row_tokens=seq_len, max_documents=max_documents)

    def __len__(self) -> int:
        return len(self._plan.starts) - 1

    def item(self, index: int) -> PackedRow:
        """Return the row at `index`."""
        row = PackedRow([], [], [])
        for document in self._documents(index):
            sample = self._samples[document]
            row.input_ids.extend(sample.input_ids)
            row.labels.extend(sample.labels)
            row.ends.append(len(row.input_ids))
        return row

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, labels and the assignment of samples to rows."""
        digest = xxhash.xxh3_128(f"{self._samples.fingerprint} {self.seq_len}".encode())
        digest.update(self._plan.documents.tobytes())
        digest.update(self._plan.starts.tobytes())
        return digest.hexdigest()

    def costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the costs of rows, (indices,) float64; see `deal_rows`."""
        return np.array([self._samples.costs(self._documents(index)).sum() for index in indices])

    def show(self, index: int) -> str:
        """Return the texts of a row's samples, separated by a line, with the spans that contribute to the loss in
        [[ ]]."""
        return "\n--- next document ---\n".join(self._samples.show(document) for document in self._documents(index))

    def _documents(self, row: int) -> list[int]:
        starts = self._plan.starts
        return self._plan.documents[starts[row] : starts[row + 1]].tolist()


def deal_rows(costs: np.ndarray, ranks: int, size: int, *, evenly: bool = False) -> np.ndarray:
    """Return which rows of a step each rank and micro-batch gets, (ranks, micro-batches, size) int64.

    Ranks wait for one another in every micro-batch, so rows of similar cost become the micro-batches that run at the
    same time, and of each group the next largest row goes to the rank with the smallest sum.

    Args:
        costs: Cost of each row, (ranks x micro-batches x size,): the squares of its documents' lengths plus
            `LINEAR_TOKENS` per token.
        evenly: Make all micro-batches alike, since the stages of a pipeline wait for its largest.
    """
    order = np.argsort(-costs, kind="stable")
    cells = len(costs) // size if evenly else ranks
    groups = order.reshape(-1, size, cells)  # in each group the rows of a round, from the largest
    dealt = np.empty((len(groups), cells, size), dtype=np.int64)
    for group, rounds in zip(dealt, groups, strict=True):
        sums = np.zeros(cells)
        for number, rows in enumerate(rounds):
            smallest_first = np.argsort(sums, kind="stable")
            group[smallest_first, number] = rows
            sums[smallest_first] += costs[rows]
    # (groups, cells, size), where a group is a micro-batch, or the only one holds those of all ranks
    return dealt.reshape(-1, ranks, size).transpose(1, 0, 2)


def describe_dealing(steps: Sequence[np.ndarray], ranks: int, size: int, *, evenly: bool = False) -> str:
    """Return how much longer the slowest rank of a micro-batch takes than the mean, with dealt rows and without.

    Args:
        steps: Costs of the rows of each step, in the order in which they are drawn. Others: see `deal_rows`.
    """
    sums = np.zeros((2, 2))  # (drawn, dealt) x (largest rank of each micro-batch, mean of the ranks)
    for costs in steps:
        drawn = np.arange(len(costs)).reshape(ranks, -1, size)
        for row, places in zip(sums, (drawn, deal_rows(costs, ranks, size, evenly=evenly)), strict=True):
            of_ranks = costs[places].sum(2)  # (ranks, micro-batches)
            row += of_ranks.max(0).sum(), of_ranks.mean(0).sum()
    drawn_ratio, dealt_ratio = sums[:, 0] / sums[:, 1]
    return (
        f"row balance: dealt by cost, the slowest rank of a micro-batch has {dealt_ratio:.2f} x the mean "
        f"({drawn_ratio:.2f} x as drawn)"
    )


def documents_size(max_documents: int) -> int:
    """Return the size of per-document tensors: documents of a row, plus one for the padding, rounded up."""
    return -(-(max_documents + 1) // _DOCUMENTS_MULTIPLE) * _DOCUMENTS_MULTIPLE


def plan_rows(lengths: Sequence[int] | np.ndarray, size: int) -> _RowPlan:
    """Assign every document to a row of `size` tokens. Deterministic; documents of equal length are used in order.

    Args:
        lengths: Length of each document in tokens, (documents,), from 1 to `size`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    by_length = np.argsort(lengths.astype(np.uint16) if size < 2**16 else lengths, kind="stable")
    counts = np.bincount(lengths, minlength=size + 1)
    patterns = _best_fit(counts, size)
    if _rows(patterns) * size > 1.001 * lengths.sum() + size:
        patterns = min(patterns, _minimum_slack(counts, size), key=_rows)
    next_index = np.cumsum(counts) - counts  # index in `by_length` of the next unused document of each length
    indices, starts = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    filled = 0
    for pattern, rows in patterns:
        table = np.empty((rows, len(pattern)), dtype=np.int64)
        for column, length in enumerate(pattern):
            table[:, column] = np.arange(next_index[length], next_index[length] + rows)
            next_index[length] += rows
        indices.append(table.reshape(-1))
        starts.append(filled + len(pattern) * np.arange(1, rows + 1))
        filled += table.size
    return _RowPlan(by_length[np.concatenate(indices)], np.concatenate(starts))


def _rows(patterns: list[Pattern]) -> int:
    return sum(rows for _, rows in patterns)


def _best_fit(counts: np.ndarray, size: int) -> list[Pattern]:
    """Put each document, longest first, into the fullest row that still has room for it.

    Args:
        counts: Number of documents of each length, (size + 1,).
    """
    rows_with: list[list[Pattern]] = [[] for _ in range(size + 1)]  # open rows, indexed by their remaining room
    rooms = 0  # bit r is set if there are rows with remaining room r

    def put(pattern: list[int], rows: int, room: int) -> int:
        rows_with[room].append((pattern, rows))
        return rooms | 1 << room

    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        while count:
            larger = rooms >> length
            if not larger:  # no open row has room: as many new rows as the documents of this length fill
                at_once = min(count, size // length)
                rows = count // at_once
                rooms = put([length] * at_once, rows, size - length * at_once)
                count -= rows * at_once
                continue
            room = length + (larger & -larger).bit_length() - 1  # lowest bit: the least room that is enough
            pattern, rows = rows_with[room].pop()
            taken = min(count, rows)
            if taken < rows:
                rows_with[room].append((pattern, rows - taken))
            if not rows_with[room]:
                rooms &= ~(1 << room)
            rooms = put([*pattern, length], taken, room - length)
            count -= taken
    return [each for group in rows_with for each in group]


def _minimum_slack(counts: np.ndarray, size: int) -> list[Pattern]:
    """Fill rows one pattern at a time: the longest document, a representative mixture, an exact completion.

    The mixture follows the distribution of the remaining lengths, so that the last rows can still be completed. The
    completion is the subset of lengths with the largest sum that fits (minimum bin slack, Gupta and Ho 1999).

    Args:
        counts: Number of documents of each length, (size + 1,).
    """
    left = counts.astype(np.int64)
    patterns = []
    while left.any():
        longest = int(np.flatnonzero(left)[-1])
        left[longest] -= 1
        pattern = [longest, *_mixture(left, size - longest)]
        pattern += _completion(left, size - sum(pattern))
        lengths, times = np.unique(pattern, return_counts=True)
        more = int((left[lengths] // times).min())  # further rows with the same pattern
        left[lengths] -= more * times
        patterns.append((pattern, 1 + more))
    return patterns


def _mixture(left: np.ndarray, room: int) -> list[int]:
    """Take documents at evenly spaced quantiles of the remaining lengths, leaving room for `_KEPT_FREE` more."""
    documents = int(left.sum())
    if not documents:
        return []
    mean = int(left @ np.arange(len(left))) / documents
    wanted = min(int(room / mean) - _KEPT_FREE, documents)
    if wanted <= 0:
        return []
    ranks = ((np.arange(wanted) + 0.5) / wanted * documents).astype(np.int64)
    lengths = np.searchsorted(left.cumsum(), ranks, side="right")
    lengths = lengths[lengths.cumsum() <= room]
    np.subtract.at(left, lengths, 1)
    return lengths.tolist()


def _completion(left: np.ndarray, room: int) -> list[int]:
    """Take distinct remaining lengths whose sum is the largest possible one up to `room`."""
    available = np.flatnonzero(left[: room + 1])
    if not len(available):
        return []
    step = -(-len(available) // _CANDIDATES)
    candidates = available[(len(available) - 1) % step :: step].tolist()
    sums = [1]  # sums[i]: bit s is set if a subset of the first i candidates has the sum s
    for length in candidates:
        sums.append(sums[-1] | sums[-1] << length)
    wanted = (sums[-1] & (2 << room) - 1).bit_length() - 1
    taken = []
    # Backtrack: take a candidate if the earlier ones can make the rest of the sum.
    for length, before in zip(reversed(candidates), reversed(sums[:-1]), strict=True):
        if wanted >= length and before >> (wanted - length) & 1:
            taken.append(length)
            wanted -= length
    left[taken] -= 1
    return taken
