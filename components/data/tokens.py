"""Tokenized samples concatenated in flat arrays: the storage of a `Dataset`, in memory or in a file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from components.data.examples import IGNORED, Example

if TYPE_CHECKING:
    import numpy as np

VALUES_AT_ONCE = 1 << 20
"""Values per read when a whole column is scanned."""

# numpy is imported inside functions because checking files on a login node does not need it.


class Column(Protocol):
    """1-D array of integers, in memory or in a file from which each slice is read."""

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Tokens(NamedTuple):
    """Samples after `trimmed`: sample i is `[starts[i] : stops[i]]` of both columns. 8 bytes per token."""

    ids: Column  # (tokens,) int32
    labels: Column  # (tokens,) int32
    starts: np.ndarray  # (samples,) int64
    stops: np.ndarray  # (samples,) int64

    @property
    def runs(self) -> Iterator[slice]:
        """Token ranges in which samples are contiguous."""
        import numpy as np

        gaps = np.flatnonzero(self.starts[1:] != self.stops[:-1]) + 1
        for first, last in zip([0, *gaps.tolist()], [*gaps.tolist(), len(self.starts)], strict=True):
            if last > first:
                yield slice(int(self.starts[first]), int(self.stops[last - 1]))

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, labels and sample boundaries, independent of how the samples are stored."""
        import numpy as np

        digest = xxhash.xxh3_128()
        for column in (self.ids, self.labels):
            for piece in self._pieces:
                digest.update(column[piece].data)
        digest.update(np.concatenate([[0], np.cumsum(self.stops - self.starts)]).astype(np.int64).data)
        return digest.hexdigest()

    @property
    def targets(self) -> int:
        """Number of tokens that contribute to the loss."""
        import numpy as np

        return sum(int(np.count_nonzero(self.labels[piece] != IGNORED)) for piece in self._pieces)

    @property
    def _pieces(self) -> Iterator[slice]:
        """The runs, in slices of at most VALUES_AT_ONCE tokens."""
        for run in self.runs:
            for start in range(run.start, run.stop, VALUES_AT_ONCE):
                yield slice(start, min(start + VALUES_AT_ONCE, run.stop))


def flattened(examples: Iterable[Example]) -> Tokens:
    """Concatenate samples."""
    import numpy as np

    ids, labels, ends = array("i"), array("i"), array("q", [0])
    for example in examples:
        ids.extend(example.input_ids)
        labels.extend(example.labels)
        ends.append(len(ids))
    bounds = np.asarray(ends, dtype=np.int64)
    return Tokens(np.asarray(ids, dtype=np.int32), np.asarray(labels, dtype=np.int32), bounds[:-1], bounds[1:])


def shortened(tokens: Tokens, seq_len: int, drop: bool) -> tuple[Tokens, np.ndarray]:
    """Truncate samples to `seq_len` tokens, or drop longer ones.

    A truncated sample ends at its last target token; one without a target is dropped. Only the boundaries change, no
    token is copied.

    Returns:
        The remaining samples, and the new length of every original sample, (samples,) int64; 0: dropped.
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
