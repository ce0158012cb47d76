"""Tokenized samples end to end in flat arrays: what a `Dataset` keeps, in memory or in a file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from components.data.examples import IGNORED, Example

if TYPE_CHECKING:
    import numpy as np

VALUES_AT_ONCE = 1 << 20
"""Values of a column that are read at once, where all of them are."""

# numpy is imported where it is used: who only looks at files on a login node needs none of it.


class Column(Protocol):
    """Integers in an array in memory, or in a file that each slice is read from."""

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Tokens(NamedTuple):
    """Sample i is at `[starts[i] : stops[i]]` of both columns, after `trimmed`. 8 bytes per token."""

    ids: Column  # (tokens,) int32
    labels: Column  # (tokens,) int32
    starts: np.ndarray  # (samples,) int64
    stops: np.ndarray  # (samples,) int64

    @property
    def runs(self) -> Iterator[slice]:
        """Where samples follow one another without a gap."""
        import numpy as np

        gaps = np.flatnonzero(self.starts[1:] != self.stops[:-1]) + 1
        for first, last in zip([0, *gaps.tolist()], [*gaps.tolist(), len(self.starts)], strict=True):
            if last > first:
                yield slice(int(self.starts[first]), int(self.stops[last - 1]))

    @property
    def fingerprint(self) -> str:
        """A hash of every token and label, and of where samples end: equal where, and only where, they are."""
        import numpy as np

        digest = xxhash.xxh3_128()
        for column in (self.ids, self.labels):
            for piece in self._pieces:
                digest.update(column[piece].data)
        digest.update(np.concatenate([[0], np.cumsum(self.stops - self.starts)]).astype(np.int64).data)
        return digest.hexdigest()

    @property
    def targets(self) -> int:
        """Tokens that carry the loss."""
        import numpy as np

        return sum(int(np.count_nonzero(self.labels[piece] != IGNORED)) for piece in self._pieces)

    @property
    def _pieces(self) -> Iterator[slice]:
        """The runs, in slices of at most VALUES_AT_ONCE tokens."""
        for run in self.runs:
            for start in range(run.start, run.stop, VALUES_AT_ONCE):
                yield slice(start, min(start + VALUES_AT_ONCE, run.stop))


def flattened(examples: Iterable[Example]) -> Tokens:
    """Lay samples end to end."""
    import numpy as np

    ids, labels, ends = array("i"), array("i"), array("q", [0])
    for example in examples:
        ids.extend(example.input_ids)
        labels.extend(example.labels)
        ends.append(len(ids))
    places = np.asarray(ends, dtype=np.int64)
    return Tokens(np.asarray(ids, dtype=np.int32), np.asarray(labels, dtype=np.int32), places[:-1], places[1:])


def shortened(tokens: Tokens, seq_len: int, drop: bool) -> tuple[Tokens, np.ndarray]:
    """Cut samples to `seq_len` tokens and to their last target there, or drop the long ones; leave out empty ones.

    Only the places change, no token is copied. Returns the rest, and the new length of every sample, (samples,).
    """
    import numpy as np

    after = tokens.stops - tokens.starts
    long = np.flatnonzero(after > seq_len)
    after[long] = 0
    for sample in [] if drop else long.tolist():
        start = tokens.starts[sample]
        targets = np.flatnonzero(tokens.labels[start : start + seq_len] != IGNORED)
        after[sample] = targets[-1] + 1 if len(targets) else 0
    kept = after > 0
    starts = tokens.starts[kept]
    return Tokens(tokens.ids, tokens.labels, starts, starts + after[kept]), after
