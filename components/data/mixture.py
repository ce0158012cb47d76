"""Mixtures of sources by weight: the order of sources, and the sources as one dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from math import gcd, lcm

import xxhash

from components.conversation import Prompt
from components.data.dataset import Dataset, Facts, ItemSequence
from components.data.examples import Example, PackedRow
from components.data.order import BlockOrder
from components.data.packing import PackedDataset
from components.data.token_store.rows import TokenRows

Part = Dataset | PackedDataset | TokenRows


@dataclass(frozen=True, slots=True)
class Shares:
    """Infinite deterministic stream of source indices, in proportion to the weights and without state.

    The sources form a binary tree of halves. Each split assigns to its left half the positions at which
    floor(n x share + phase) increases (a Beatty sequence), so the number of earlier occurrences at any position is one
    integer division per split. After n positions, a source has occurred n x share times, with an error of less than one
    per split on its path: less than 1 for two sources, 2 for four, 3 for eight.
    """

    weights: tuple[int, ...]
    """Integer weights of the sources, at least 1 each."""
    seed: int
    """Seed of the phase of each split."""

    def at(self, position: int) -> tuple[int, int]:
        """Return the source at `position`, and the number of its earlier occurrences."""
        first, last, offset = 0, len(self.weights), position
        while last - first > 1:
            middle = (first + last) // 2
            before = self._count_left(first, middle, last, offset)
            after = self._count_left(first, middle, last, offset + 1)
            if after > before:
                last, offset = middle, before
            else:
                first, offset = middle, offset - before
        return first, offset

    def _count_left(self, first: int, middle: int, last: int, positions: int) -> int:
        """Return how many of the first `positions` of the sources [first, last) belong to [first, middle)."""
        left, both = sum(self.weights[first:middle]), sum(self.weights[first:last])
        return (positions * left + _hashed(self.seed, f"{first}:{last}") % both) // both


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """Infinite stream of row indices of a `MixtureDataset`, a pure function of (seed, position).

    `Shares` selects the source at a position. Each source has its own `BlockOrder`, which depends only on the seed and
    the source's name, and starts a new epoch when all its rows were used. So no row repeats within an epoch of its
    source, any position costs microseconds, and a source's order does not depend on the other sources.
    """

    sizes: tuple[int, ...]
    """Number of rows of each source."""
    names: tuple[str, ...]
    """Names of the sources."""
    shares: Shares
    """Order of the sources."""
    seed: int
    """Any integer; equal seeds give equal streams."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Rows of a block and blocks of a window of each source (`BlockOrder`); empty: all rows are shuffled."""

    @property
    def size(self) -> int:
        """Total rows of all sources. After this many positions some rows may have repeated and others not occurred."""
        return sum(self.sizes)

    def at(self, position: int) -> int:
        """Return the row index at `position` (0-based); indices run over the concatenated sources."""
        source, offset = self.shares.at(position)
        block, window = self.blocks[source] if self.blocks else (1, 1)
        order = BlockOrder(self.sizes[source], _hashed(self.seed, self.names[source]), block, window)
        return sum(self.sizes[:source]) + order.at(offset)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the row indices at `count` positions from `start`."""
        return [self.at(position) for position in range(start, start + count)]


@dataclass(slots=True)
class MixtureFacts:
    """Statistics of each source of a mixture, and its share."""

    sources: dict[str, Facts]
    """Statistics by source name."""
    shares: list[float] | None
    """Share of rows of each source, in the order of `sources`; None: held-out rows, which are each read once."""

    @property
    def batch_unit(self) -> str:
        """What batch sizes count, in the plural."""
        return next(iter(self.sources.values())).batch_unit

    @property
    def warning(self) -> str:
        """Sources that lose many of their rows; empty if there are none."""
        return "\n".join(each.warning for each in self.sources.values() if each.warning)

    def __str__(self) -> str:
        if self.shares is None:
            return "\n".join(f"{name}: {facts}" for name, facts in self.sources.items())
        sources = list(zip(self.sources.items(), self.shares, strict=True))
        targets = [share * facts.target_tokens / facts.order_size for (_, facts), share in sources]
        return "\n".join(
            f"{name}, {100 * share:.2f} % of rows, {100 * mean / sum(targets):.2f} % of tokens with loss: {facts}"
            for ((name, facts), share), mean in zip(sources, targets, strict=True)
        )

    def with_passes(self, rows: int) -> MixtureFacts:
        """Return a copy whose `passes` of each source correspond to training on `rows` rows of the mixture."""
        shares = self.shares or [0.0] * len(self.sources)
        parts = zip(self.sources.items(), shares, strict=True)
        return replace(self, sources={name: facts.with_passes(share * rows) for (name, facts), share in parts})


class MixtureDataset(ItemSequence[Example | PackedRow]):
    """Concatenation of the rows of several sources; `order` mixes them.

    Sources are sorted by name, independent of their order in the config.
    """

    def __init__(self, parts: Mapping[str, Part], weights: Mapping[str, float] | None = None) -> None:
        """Concatenate `parts` (datasets by name); `weights` by name, or None for held-out rows."""
        self.parts = dict(sorted(parts.items()))
        self._weights = None if weights is None else integer_weights([weights[name] for name in self.parts])
        self._ends = list(accumulate(map(len, self.parts.values())))
        self.pad_token_id = next(iter(self.parts.values())).pad_token_id
        """Input id at padded positions."""

    def __len__(self) -> int:
        return self._ends[-1]

    def item(self, index: int) -> Example | PackedRow:
        """Return the row at `index` of the concatenation."""
        part, row = self._place_of(index)
        return part[row]

    @property
    def is_remote(self) -> bool:
        """Whether rows of any source are read from an object store."""
        return any(part.is_remote for part in self.parts.values())

    def prefetch(self, indices: Iterable[int]) -> None:
        """Begin to fetch rows of object stores that are used soon, in this order."""
        for index in indices:
            part, row = self._place_of(index)
            part.prefetch([row])

    def _place_of(self, index: int) -> tuple[Part, int]:
        number = bisect_right(self._ends, index)
        return list(self.parts.values())[number], index - [0, *self._ends][number]

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of all sources."""
        return [prompt for part in self.parts.values() for prompt in part.prompts]

    @property
    def facts(self) -> MixtureFacts:
        """Statistics and share of each source."""
        shares = None if self._weights is None else [weight / sum(self._weights) for weight in self._weights]
        return MixtureFacts({name: part.facts for name, part in self.parts.items()}, shares)

    @property
    def documents(self) -> int:
        """Size of per-document tensors; 0: rows are not packed."""
        return max(part.documents if isinstance(part, PackedDataset | TokenRows) else 0 for part in self.parts.values())

    @property
    def seq_len(self) -> int:
        """Length of a packed row in tokens; 0: rows are not packed."""
        return max(part.seq_len if isinstance(part, PackedDataset | TokenRows) else 0 for part in self.parts.values())

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and labels of the sources, their names and their weights."""
        sources = [f"{name} {part.fingerprint}" for name, part in self.parts.items()]
        return xxhash.xxh3_128(f"{sources} {self._weights}".encode()).hexdigest()

    def order(self, seed: int) -> MixtureOrder:
        """Return the training order of the rows."""
        weights = self._weights or (1,) * len(self.parts)
        sizes = tuple(map(len, self.parts.values()))
        blocks = tuple(part.blocks if isinstance(part, TokenRows) else (1, 1) for part in self.parts.values())
        return MixtureOrder(sizes, tuple(self.parts), Shares(weights, seed), seed, blocks)

    def show(self, index: int) -> str:
        """Return the text of an example row, alternating between sources, with the loss spans in [[ ]]."""
        round_, number = divmod(index, len(self.parts))
        name, part = list(self.parts.items())[number]
        return f"{name}: {part.show(round_ % len(part))}"


def sources_of(dataset: Part | MixtureDataset) -> dict[str, Part]:
    """Return the sources of a mixture by name; empty for other datasets."""
    return dataset.parts if isinstance(dataset, MixtureDataset) else {}


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of `weights`, which are taken as exact decimals (0.1 is 1/10)."""
    exact = [Fraction(str(weight)) for weight in weights]
    scaled = [int(each * lcm(*(other.denominator for other in exact))) for each in exact]
    return tuple(each // gcd(*scaled) for each in scaled)


def _hashed(seed: int, text: str) -> int:
    return int.from_bytes(blake2b(f"{seed}:{text}".encode(), digest_size=8).digest(), "big")
