"""Which documents share a row: planned once from their lengths, the same on every rank and for every seed.

Only the number of documents of each length matters, so the work grows with the different lengths and not with the
documents: a pattern of lengths makes as many rows as there are documents for. Best fit is near the optimum where
lengths are spread over the whole row, or where a row holds two or three documents. Where it leaves more than a
thousandth empty, minimum slack plans too, better where a row holds more; the plan with fewer rows is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Pattern = tuple[list[int], int]
"""Lengths of a row's documents, and how many such rows there are."""

_CANDIDATES = 48  # lengths that may complete a row: the sums of so many are dense
_KEPT_FREE = 2  # documents of mean length for which a row keeps room, to be completed exactly


class Plan(NamedTuple):
    """Documents by row: those of row r are `documents[starts[r] : starts[r + 1]]`."""

    documents: np.ndarray  # (documents,) int64
    starts: np.ndarray  # (rows + 1,) int64


def plan_rows(lengths: Sequence[int] | np.ndarray, size: int) -> Plan:
    """Put every document into a row of `size` tokens. Documents of one length are dealt out in their order.

    A function of its arguments alone.

    Args:
        lengths: Tokens of each document, at least 1 and at most `size`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    by_length = np.argsort(lengths.astype(np.uint16) if size < 2**16 else lengths, kind="stable")
    counts = np.bincount(lengths, minlength=size + 1)
    patterns = best_fit(counts, size)
    if _rows(patterns) * size > 1.001 * lengths.sum() + size:
        patterns = min(patterns, minimum_slack(counts, size), key=_rows)
    next_place = np.cumsum(counts) - counts  # where in `by_length` the next document of each length is
    places, starts = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    filled = 0
    for pattern, rows in patterns:
        table = np.empty((rows, len(pattern)), dtype=np.int64)
        for column, length in enumerate(pattern):
            table[:, column] = np.arange(next_place[length], next_place[length] + rows)
            next_place[length] += rows
        places.append(table.reshape(-1))
        starts.append(filled + len(pattern) * np.arange(1, rows + 1))
        filled += table.size
    return Plan(by_length[np.concatenate(places)], np.concatenate(starts))


def _rows(patterns: list[Pattern]) -> int:
    return sum(rows for _, rows in patterns)


def best_fit(counts: np.ndarray, size: int) -> list[Pattern]:
    """Give each document, the longest first, to the row with the least room that has room for it.

    Args:
        counts: Documents of each length, (size + 1,).
    """
    rows_with: list[list[Pattern]] = [[] for _ in range(size + 1)]  # by the room that is left
    rooms = 0  # a bit for each room of which there are rows

    def put(pattern: list[int], rows: int, room: int) -> int:
        rows_with[room].append((pattern, rows))
        return rooms | 1 << room

    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        while count:
            larger = rooms >> length
            if not larger:
                at_once = min(count, size // length)
                rows = count // at_once
                rooms = put([length] * at_once, rows, size - length * at_once)
                count -= rows * at_once
                continue
            room = length + (larger & -larger).bit_length() - 1
            pattern, rows = rows_with[room].pop()
            taken = min(count, rows)
            if taken < rows:
                rows_with[room].append((pattern, rows - taken))
            if not rows_with[room]:
                rooms &= ~(1 << room)
            rooms = put([*pattern, length], taken, room - length)
            count -= taken
    return [each for group in rows_with for each in group]


def minimum_slack(counts: np.ndarray, size: int) -> list[Pattern]:
    """Make rows one pattern at a time: the longest document, others as mixed as all that are left, an exact end.

    The mixture keeps what is left as various as what there was, so that ends are found until the last rows; the end is
    the subset of other lengths whose sum is largest (after the minimum bin slack of Gupta and Ho 1999).

    Args:
        counts: Documents of each length, (size + 1,).
    """
    left = counts.astype(np.int64)
    patterns = []
    while left.any():
        longest = int(np.flatnonzero(left)[-1])
        left[longest] -= 1
        pattern = [longest, *_mixture(left, size - longest)]
        pattern += _completion(left, size - sum(pattern))
        lengths, times = np.unique(pattern, return_counts=True)
        more = int((left[lengths] // times).min())  # rows of the same pattern
        left[lengths] -= more * times
        patterns.append((pattern, 1 + more))
    return patterns


def _mixture(left: np.ndarray, room: int) -> list[int]:
    """Take documents at even steps through all that are left, in order of length; keep room for `_KEPT_FREE`."""
    documents = int(left.sum())
    if not documents:
        return []
    mean = int(left @ np.arange(len(left))) / documents
    wanted = min(int(room / mean) - _KEPT_FREE, documents)
    if wanted <= 0:
        return []
    places = ((np.arange(wanted) + 0.5) / wanted * documents).astype(np.int64)
    lengths = np.searchsorted(left.cumsum(), places, side="right")
    lengths = lengths[lengths.cumsum() <= room]
    np.subtract.at(left, lengths, 1)
    return lengths.tolist()


def _completion(left: np.ndarray, room: int) -> list[int]:
    """Take different lengths with the largest sum up to `room` that some of those that are left can make."""
    there = np.flatnonzero(left[: room + 1])
    if not len(there):
        return []
    step = -(-len(there) // _CANDIDATES)
    candidates = there[(len(there) - 1) % step :: step].tolist()
    sums = [1]  # bit by sum that the candidates so far can make
    for length in candidates:
        sums.append(sums[-1] | sums[-1] << length)
    wanted = (sums[-1] & (2 << room) - 1).bit_length() - 1
    taken = []
    for length, before in zip(reversed(candidates), reversed(sums[:-1]), strict=True):
        if wanted >= length and before >> (wanted - length) & 1:
            taken.append(length)
            wanted -= length
    left[taken] -= 1
    return taken
