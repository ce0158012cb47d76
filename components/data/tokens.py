"""Tokenized samples end to end in flat arrays: what a `Dataset` keeps, and what is kept on disk of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from components.data.examples import IGNORED, Example

if TYPE_CHECKING:
    import numpy as np


class Tokens(NamedTuple):
    """Sample i is at `[ends[i] : ends[i + 1]]`; `trimmed` has been applied to each. 8 bytes per token."""

    ids: np.ndarray  # (tokens,) int32
    labels: np.ndarray  # (tokens,) int32
    ends: np.ndarray  # (samples + 1,) int64


def flattened(examples: Iterable[Example]) -> Tokens:
    """Lay samples end to end."""
    import numpy as np  # not at import: those who only look at files need none of it

    ids, labels, ends = array("i"), array("i"), array("q", [0])
    for example in examples:
        ids.extend(example.input_ids)
        labels.extend(example.labels)
        ends.append(len(ids))
    return Tokens(np.asarray(ids, dtype=np.int32), np.asarray(labels, dtype=np.int32), np.asarray(ends, dtype=np.int64))


def joined(parts: list[Tokens]) -> Tokens:
    """Lay parts end to end."""
    import numpy as np

    sizes = np.cumsum([0, *(len(part.ids) for part in parts)])
    ends = [part.ends[1:] + size for part, size in zip(parts, sizes, strict=False)]
    return Tokens(
        np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
        np.concatenate([np.zeros(0, np.int32), *(part.labels for part in parts)]),
        np.concatenate([np.zeros(1, np.int64), *ends]),
    )


def shortened(tokens: Tokens, seq_len: int, drop: bool) -> tuple[Tokens, np.ndarray]:
    """Cut samples to `seq_len` tokens and to their last target there, or drop the long ones; leave out empty ones.

    Returns the rest, as it is where nothing had to be done, and the new length of every sample, (samples,).
    """
    import numpy as np

    lengths = np.diff(tokens.ends)
    long = np.flatnonzero(lengths > seq_len)
    after = lengths.copy()
    after[long] = 0
    for sample in [] if drop else long.tolist():
        start = tokens.ends[sample]
        targets = np.flatnonzero(tokens.labels[start : start + seq_len] != IGNORED)
        after[sample] = targets[-1] + 1 if len(targets) else 0
    if len(long) == 0 and lengths.all():
        return tokens, after
    place = np.arange(len(tokens.ids)) - np.repeat(tokens.ends[:-1], lengths)  # within the sample, (tokens,)
    kept = place < np.repeat(after, lengths)
    ends = np.concatenate([[0], np.cumsum(after[after > 0])])
    return Tokens(tokens.ids[kept], tokens.labels[kept], ends), after


def hash_of_arrays(tokens: Tokens) -> str:
    """Return a hash of every token, label and end."""
    digest = xxhash.xxh3_128()
    for part in tokens:
        digest.update(part.data)
    return digest.hexdigest()
