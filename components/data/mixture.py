"""Several sources in shares by weight: which source each row of the order is from, and the sources as one data set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from math import gcd, lcm
from typing import overload

import xxhash

from components.data.dataset import Dataset, Facts
from components.data.examples import Example, PackedRow
from components.data.order import SampleOrder
from components.data.packed import PackedDataset

Part = Dataset | PackedDataset


@dataclass(frozen=True, slots=True)
class Shares:
    """An endless stream of sources, each as often as its weight says: no chance, and no state.

    The stream is split in two, and each half again, until one source is left. A split gives the left half the positions
    at which floor(n x share + phase) grows (a Beatty sequence), so how often before any position is one division, in
    whole numbers. After n positions a source was there n x share times, give or take less than one for each split that
    leads to it: less than 1 for two sources, 2 for four, 3 for eight.
    """

    weights: tuple[int, ...]
    """Of the sources, at least 1 each."""
    seed: int
    """Where in its period each split begins."""

    def at(self, position: int) -> tuple[int, int]:
        """Return the source at `position`, and how often it was there before."""
        first, last, place = 0, len(self.weights), position
        while last - first > 1:
            middle = (first + last) // 2
            before, after = self._left(first, middle, last, place), self._left(first, middle, last, place + 1)
            if after > before:
                last, place = middle, before
            else:
                first, place = middle, place - before
        return first, place

    def _left(self, first: int, middle: int, last: int, positions: int) -> int:
        """How many of the first `positions` that the sources [first, last) have are of those before `middle`."""
        left, both = sum(self.weights[first:middle]), sum(self.weights[first:last])
        return (positions * left + _hashed(self.seed, f"{first}:{last}") % both) // both


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """An endless stream of row indices of a `MixtureDataset`, a pure function of (seed, position).

    `Shares` says whose turn it is; each source is in an order of its own (`SampleOrder`), a function of (seed, its
    name) alone, and begins anew when all its rows were there. So no row comes again before all of its source have come,
    any position costs microseconds, and a source's order is the same whatever is mixed with it.
    """

    sizes: tuple[int, ...]
    """Rows of each source."""
    names: tuple[str, ...]
    """Of the sources."""
    shares: Shares
    """Whose turn it is."""
    seed: int
    """Any integer."""

    @property
    def size(self) -> int:
        """Rows of all sources. After so many positions some were passed more than once, others not yet."""
        return sum(self.sizes)

    def at(self, position: int) -> int:
        """Return the index of the row at `position` (0-based) of the stream; rows are counted source by source."""
        source, place = self.shares.at(position)
        order = SampleOrder(self.sizes[source], _hashed(self.seed, self.names[source]))
        return sum(self.sizes[:source]) + order.at(place)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the indices at `count` positions from `start` on."""
        return [self.at(position) for position in range(start, start + count)]


@dataclass(slots=True)
class MixtureFacts:
    """What became of the rows of each source, and how much of each is trained on."""

    sources: dict[str, Facts]
    """By name."""
    shares: list[float] | None
    """Of the rows, in the order of the sources; None: held-out rows, each of which is read once."""

    def __str__(self) -> str:
        if self.shares is None:
            return "\n".join(f"{name}: {facts}" for name, facts in self.sources.items())
        sources = list(zip(self.sources.items(), self.shares, strict=True))
        targets = [share * facts.target_tokens / facts.order_size for (_, facts), share in sources]
        return "\n".join(
            f"{name}, {100 * share:.2f} % of rows, {100 * mean / sum(targets):.2f} % of tokens with loss: {facts}"
            for ((name, facts), share), mean in zip(sources, targets, strict=True)
        )

    def after(self, rows: int) -> MixtureFacts:
        """Return the same with the passes over each source that so many rows of the order make."""
        shares = self.shares or [0.0] * len(self.sources)
        parts = zip(self.sources.items(), shares, strict=True)
        return replace(self, sources={name: facts.after(share * rows) for (name, facts), share in parts})


class MixtureDataset(Sequence[Example | PackedRow]):
    """The rows of several sources, one source after the other; `order` mixes them.

    Sources are taken in the order of their names, however the config lists them.
    """

    def __init__(self, parts: Mapping[str, Part], weights: Mapping[str, float] | None = None) -> None:
        """`weights` are those of the sources that are trained on; held-out rows have none."""
        self.parts = dict(sorted(parts.items()))
        self._weights = None if weights is None else integer_weights([weights[name] for name in self.parts])
        self._ends = list(accumulate(map(len, self.parts.values())))
        self.prompts = [prompt for part in self.parts.values() for prompt in part.prompts]
        """Questions of every source."""
        self.pad_token_id = next(iter(self.parts.values())).pad_token_id
        """Input at padded positions."""

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Example | PackedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example | PackedRow]: ...
    def __getitem__(self, index: int | slice) -> Example | PackedRow | list[Example | PackedRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        return list(self.parts.values())[number][index - [0, *self._ends][number]]

    @property
    def facts(self) -> MixtureFacts:
        """What became of the rows of each source."""
        shares = None if self._weights is None else [weight / sum(self._weights) for weight in self._weights]
        return MixtureFacts({name: part.facts for name, part in self.parts.items()}, shares)

    @property
    def documents(self) -> int:
        """The length that tensors of documents have; 0: rows are not packed."""
        return max(part.documents if isinstance(part, PackedDataset) else 0 for part in self.parts.values())

    @property
    def seq_len(self) -> int:
        """Tokens that a packed row has room for."""
        return max(part.seq_len if isinstance(part, PackedDataset) else 0 for part in self.parts.values())

    @property
    def fingerprint(self) -> str:
        """A hash of every token and label of every source, of the names and the weights."""
        said = [f"{name} {part.fingerprint}" for name, part in self.parts.items()]
        return xxhash.xxh3_128(f"{said} {self._weights}".encode()).hexdigest()

    def order(self, seed: int) -> MixtureOrder:
        """Return in which order rows are trained on."""
        weights = self._weights or (1,) * len(self.parts)
        return MixtureOrder(tuple(map(len, self.parts.values())), tuple(self.parts), Shares(weights, seed), seed)

    def show(self, index: int) -> str:
        """Return the `index`-th text to look at, the sources in turn; the part that carries the loss in [[ ]]."""
        round_, number = divmod(index, len(self.parts))
        name, part = list(self.parts.items())[number]
        return f"{name}: {part.show(round_ % len(part))}"


def sources_of(dataset: Part | MixtureDataset) -> dict[str, Part]:
    """Return the sources of a mixture by name; none of what is no mixture."""
    return dataset.parts if isinstance(dataset, MixtureDataset) else {}


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of `weights`, taken as the decimals they are written in."""
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(each * lcm(*(every.denominator for every in exact))) for each in exact]
    return tuple(each // gcd(*whole) for each in whole)


def _hashed(seed: int, said: str) -> int:
    return int.from_bytes(blake2b(f"{seed}:{said}".encode(), digest_size=8).digest(), "big")
