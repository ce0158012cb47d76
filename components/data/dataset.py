"""The tokenized samples of one split (train or held-out)."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import xxhash

from components.config.schema.data import Overlong
from components.conversation import Prompt
from components.data.examples import IGNORED, Example, render_example, trimmed
from components.data.sources.rows import BadRowReport
from components.protocol.errors import ConfigError
from components.storage.tensor_files import KnownNumbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Item = TypeVar("_Item", covariant=True)

LINEAR_TOKENS = 2**15
"""Length of a document whose attention costs as much as its matmuls, 12 x a hidden size of 2,700. Costs of rows are
squares of lengths plus this per token."""
_WARNED_SHARE = 0.1
"""Share of dropped rows from which on the banner has a warning."""
_VALUES_AT_ONCE = 1 << 20
"""Values per read when a whole column is scanned."""


@dataclass(slots=True)
class Facts:
    """Statistics of a dataset: samples, tokens, and how many samples were cut or dropped."""

    source: str
    """Path and split of the source, for logs."""
    samples: int = 0
    """Number of samples."""
    tokens: int = 0
    """Tokens of all samples, without padding."""
    target_tokens: int = 0
    """Tokens that contribute to the loss."""
    truncated: int = 0
    """Samples truncated to seq_len tokens."""
    cut_to_turns: int = 0
    """Samples cut to their newest turns (`data.overlong=keep_last`)."""
    dropped_overlong: int = 0
    """Samples dropped because they, or their newest turns, were longer than seq_len (`data.overlong=drop`)."""
    dropped_without_target: int = 0
    """Samples dropped because they had no target token, possibly after truncation."""
    dropped_equal: int = 0
    """Pairs dropped because their answers have the same tokens, possibly after truncation."""
    dropped_bad_rows: int = 0
    """Source rows dropped because they could not become a sample (`data.bad_rows=drop`)."""
    unused: list[str] = field(default_factory=list)
    """Columns and message keys that neither the chat template nor Meshbook uses."""
    notes: list[str] = field(default_factory=list)
    """What else a user should know, such as files that are not read, or that answers end without a stop token."""
    rows: int = 0
    """Packed rows; 0: not packed, each sample is a row."""
    row_tokens: int = 0
    """Length of a packed row in tokens."""
    max_documents: int = 0
    """Largest number of samples in a packed row."""
    passes: float = 0.0
    """Epochs over this data in the whole run; 0: unknown."""
    unit: str = "sample"
    """What is counted as a sample: "pair" of answers, "answer" with a label, "text" with a label."""

    @property
    def order_size(self) -> int:
        """Number of items that an order permutes: packed rows, or samples if not packed."""
        return self.rows or self.samples

    @property
    def batch_unit(self) -> str:
        """What batch sizes count, in the plural."""
        return "packed rows" if self.rows else "sequences" if self.unit == "sample" else f"{self.unit}s"

    def with_passes(self, rows: float) -> Facts:
        """Return a copy whose `passes` corresponds to training on `rows` rows."""
        return replace(self, passes=rows / self.order_size)

    @property
    def _dropped(self) -> dict[str, int]:
        counts = {
            "longer than seq_len": self.dropped_overlong,
            "without a target": self.dropped_without_target,
            "pairs of equal answers": self.dropped_equal,
            "bad rows": self.dropped_bad_rows,
        }
        return {what: count for what, count in counts.items() if count}

    @property
    def warning(self) -> str:
        """Why at least _WARNED_SHARE of the rows are dropped, and what to change; empty if it is less."""
        dropped = sum(self._dropped.values())
        if dropped < _WARNED_SHARE * (dropped + self.samples):
            return ""
        remedies = {
            "raise training.seq_len (in evaluate.py evaluation.seq_len)": self.dropped_overlong
            + self.dropped_without_target,
            "set data.overlong=truncate": self.dropped_overlong,
            "set data.bad_rows=refuse to see the bad rows": self.dropped_bad_rows,
        }
        reason = ", ".join(f"{count:,} {what}" for what, count in self._dropped.items())
        change = " or ".join(remedy for remedy, count in remedies.items() if count)
        return (
            f"{dropped:,} of {dropped + self.samples:,} rows of {self.source} are dropped "
            f"({dropped / (dropped + self.samples):.0%}): {reason}{'; ' * bool(change)}{change}"
        )

    def __str__(self) -> str:
        counted = {f"{what} dropped": count for what, count in self._dropped.items()}
        what = "answers cut to seq_len" if self.unit == "pair" else "cut to seq_len"
        cut = {what: self.truncated, "cut to their newest turns": self.cut_to_turns}
        counted = {what: count for what, count in cut.items() if count} | counted
        is_scored = self.unit != "sample" and 0 < self.target_tokens <= 2 * self.samples
        loss = ", scored at the last token" if is_scored else f", {self.target_tokens:,} with loss"
        units = f"{self.unit}{'' if self.samples == 1 else 's'}"
        total = f"{self.samples:,} {units}, {self.tokens:,} tokens{loss}"
        parts = [f"{self.source}: {total}", *(f"{count:,} {what}" for what, count in counted.items())]
        if self.rows:
            full = 100 * self.tokens / (self.rows * self.row_tokens)
            parts.append(
                f"packed into {self.rows:,} rows of {self.row_tokens:,} tokens, {full:.2f} % full, "
                f"{self.samples / self.rows:.1f} {self.unit}s each (at most {self.max_documents:,}); "
                "batch sizes count rows"
            )
        parts += self.notes
        parts += [f"not used: {', '.join(self.unused)}"] if self.unused else []
        parts += [f"{self.passes:.2f} passes in the whole run"] if self.passes else []
        return "; ".join(parts)


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
        return "\n".join(source.warning for source in self.sources.values() if source.warning)

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

    def with_counts(self, counts: Sequence[int]) -> MixtureFacts:
        """Return a copy with the shares and passes of training on `counts` rows of the sources."""
        parts = zip(self.sources.items(), counts, strict=True)
        sources = {name: facts.with_passes(count) for (name, facts), count in parts}
        return MixtureFacts(sources, [count / max(1, sum(counts)) for count in counts])

    def describe_rows(self, counts: Sequence[int]) -> str:
        """Return the tokens, shares and passes of `counts` rows of the sources, for the banner."""
        drawn = [(name, facts, n) for (name, facts), n in zip(self.sources.items(), counts, strict=True) if n]
        rows, tokens = sum(counts), sum(n * facts.tokens / facts.order_size for _, facts, n in drawn)
        shares = [f"{name} {100 * n / rows:.2f} % ({n / facts.order_size:.2f} passes)" for name, facts, n in drawn]
        return f"{rows:,} {self.batch_unit}, about {round(tokens):,} tokens, of {', '.join(shares)}"


class _Fate(IntEnum):
    """Reason why a sample is not part of its dataset, from the weakest to the strongest."""

    kept = 0
    without_target = 1
    overlong = 2
    bad = 3
    """It could not be tokenized."""


class ItemSequence(Sequence[_Item]):
    """Base of datasets: subclasses define `__len__`, and `item` for an index in range."""

    item_name: ClassVar[str] = "row"
    """Name of an item in errors."""

    @property
    def is_remote(self) -> bool:
        """Whether items are read from an object store, so that `prefetch` is useful."""
        return False

    def prefetch(self, indices: Iterable[int]) -> None:
        """Begin to fetch items that are used soon, in this order; does nothing for items on disk."""

    @abstractmethod
    def item(self, index: int) -> _Item:
        """Return the item at `index`, which is at least 0 and below the length."""

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        if isinstance(index, slice):
            return [self.item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.item_name} {index} of {len(self)}")
        return self.item(index % len(self))


class Column(Protocol):
    """1-D array of integers, in memory or in a file from which each slice is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class TokenValues(Protocol):
    """Values of the target tokens of a dataset's rows, such as a teacher's most likely tokens."""

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        """Return the values by name, each (targets of the row, ...); they become `Batch.token_values`."""


@dataclass(frozen=True, slots=True)
class MaskedLabels:
    """Column of the ids that a loss mask marks, and of IGNORED for the others."""

    ids: Column
    mask: Column
    """(tokens,) bool"""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.where(self.mask[part], self.ids[part], IGNORED)

    def of_ids(self, ids: list[int], part: slice) -> list[int]:
        """Return the labels of a slice whose ids were read before.

        The marked tokens of a sample are a few runs, and slices of a list share its numbers, which is faster than to
        convert an array.
        """
        mask = self.mask[part].tobytes()
        labels = [IGNORED] * len(ids)
        start = mask.find(True)
        while start >= 0:
            stop = mask.find(False, start)
            stop = len(mask) if stop < 0 else stop
            labels[start:stop] = ids[start:stop]
            start = mask.find(True, stop)
        return labels


class Tokens(NamedTuple):
    """Samples after `trimmed`: sample i is `[starts[i] : stops[i]]` of both columns."""

    ids: Column  # (tokens,)
    labels: Column  # (tokens,)
    starts: np.ndarray  # (samples,) int64
    stops: np.ndarray  # (samples,) int64
    known: KnownNumbers | None = None
    """Numbers about the file that holds the columns, so that a start reads no token; None: in memory."""

    @property
    def runs(self) -> Iterator[slice]:
        """Token ranges in which samples are contiguous."""
        gaps = np.flatnonzero(self.starts[1:] != self.stops[:-1]) + 1
        for first, last in zip([0, *gaps.tolist()], [*gaps.tolist(), len(self.starts)], strict=True):
            if last > first:
                yield slice(int(self.starts[first]), int(self.stops[last - 1]))

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, labels and sample boundaries, independent of how the samples are stored."""
        return self._from_known("fingerprint", self._hash)

    @property
    def targets(self) -> int:
        """Number of tokens that contribute to the loss."""
        return self._from_known("targets", self._count_targets)

    def _from_known(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a number about these samples of the file, which may have been truncated or dropped."""
        if self.known is None:
            return compute()
        bounds = xxhash.xxh3_128(self.starts.tobytes())
        bounds.update(self.stops.tobytes())
        return self.known.get(f"{name} {bounds.hexdigest()}", compute)

    def _hash(self) -> str:
        digest = xxhash.xxh3_128()
        for column in (self.ids, self.labels):
            for piece in self._pieces:
                digest.update(np.ascontiguousarray(column[piece], np.int32).data)
        digest.update(np.concatenate([[0], np.cumsum(self.stops - self.starts)]).astype(np.int64).data)
        return digest.hexdigest()

    def _count_targets(self) -> int:
        return sum(int(np.count_nonzero(self.labels[piece] != IGNORED)) for piece in self._pieces)

    @property
    def _pieces(self) -> Iterator[slice]:
        """The runs, in slices of at most _VALUES_AT_ONCE tokens."""
        for run in self.runs:
            for start in range(run.start, run.stop, _VALUES_AT_ONCE):
                yield slice(start, min(start + _VALUES_AT_ONCE, run.stop))


def flattened(examples: Iterable[Example]) -> Tokens:
    """Concatenate samples."""
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
    after = tokens.stops - tokens.starts
    long = np.flatnonzero(after > seq_len)
    after[long] = 0
    for sample in [] if drop else long.tolist():
        start = tokens.starts[sample]
        targets = np.flatnonzero(tokens.labels[start : start + seq_len] != IGNORED)
        after[sample] = targets[-1] + 1 if len(targets) else 0
    kept = after > 0
    starts = tokens.starts[kept]
    return Tokens(tokens.ids, tokens.labels, starts, starts + after[kept], tokens.known), after


class Dataset(ItemSequence[Example]):
    """Samples in the order of their source; `facts` holds their statistics.

    A sample longer than `seq_len` is truncated on the right, dropped or rejected, depending on `overlong`; keep_last
    drops what is too long without its oldest turns. A sample without a target token is dropped. Every sample ends with
    a target token (see `trimmed`).
    `prompts` holds prompts of the source, to generate sample answers from, and `bad` its rows that make no sample.
    """

    item_name = "sample"

    def __init__(
        self,
        examples: Iterable[Example] | Tokens,
        tokenizer: PreTrainedTokenizerBase,
        *,
        facts: Facts,
        seq_len: int,
        overlong: Overlong = Overlong.truncate,
        prompts: Sequence[Prompt] = (),
        bad: BadRowReport | None = None,
    ) -> None:
        self.facts, self.bad = facts, bad or BadRowReport()
        facts.dropped_bad_rows = self.bad.count
        self.prompts = [each for each in prompts if each.calls is None or len(each.tokens) < seq_len]
        self.pad_token_id: int | None = tokenizer.pad_token_id
        """Input id at padded positions."""
        self.sources: np.ndarray
        """Index of each sample before any sample was dropped, (samples,) int64."""
        self.fates: np.ndarray
        """`_Fate` of each sample before any sample was dropped, uint8."""
        self._tokenizer = tokenizer
        tokens = examples if isinstance(examples, Tokens) else flattened(trimmed(example) for example in examples)
        self._tokens = self._fit(tokens, seq_len, overlong)

    def __len__(self) -> int:
        return len(self._tokens.starts)

    def item(self, index: int) -> Example:
        """Return the sample at `index`."""
        tokens = self._tokens
        sample = slice(tokens.starts[index], tokens.stops[index])
        ids, labels = tokens.ids[sample].tolist(), tokens.labels
        if isinstance(labels, MaskedLabels):
            return Example(ids, labels.of_ids(ids, sample))
        return Example(ids, labels[sample].tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sample in tokens, (samples,) int64."""
        return self._tokens.stops - self._tokens.starts

    def costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the costs of samples as rows, (indices,) float64; see `packing.deal_rows`."""
        lengths = (self._tokens.stops[indices] - self._tokens.starts[indices]).astype(np.float64)
        return lengths * (lengths + LINEAR_TOKENS)

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and labels: two datasets have the same one if their samples are the same."""
        return self._tokens.fingerprint

    def show(self, index: int) -> str:
        """Return the text of a sample, with the spans that contribute to the loss in [[ ]]."""
        return self.decode(self[index])

    def decode(self, example: Example) -> str:
        """Return the text of any sample, with the spans that contribute to the loss in [[ ]]."""
        return render_example(self._tokenizer, example)

    def _fit(self, tokens: Tokens, seq_len: int, overlong: Overlong) -> Tokens:
        """Truncate, drop or reject samples longer than `seq_len` tokens; record the counts in `facts`."""
        facts, before = self.facts, tokens.stops - tokens.starts
        long = np.flatnonzero(before > seq_len)
        if len(long) and overlong is Overlong.refuse:
            start, stop = tokens.starts[long[0]], tokens.stops[long[0]]
            begins = self._tokenizer.decode(tokens.ids[start : min(start + 40, stop)].tolist())
            raise ConfigError(
                f"data.overlong=refuse: a sample of {facts.source} has {before[long[0]]:,} tokens, more than "
                f"seq_len={seq_len:,}; raise training.seq_len (in evaluate.py evaluation.seq_len), or set "
                f"data.overlong to truncate or drop; the sample begins {begins!r}"
            )
        drops = overlong in (Overlong.drop, Overlong.keep_last)
        fitted, after = shortened(tokens, seq_len, drop=drops)
        self.fates = np.where(after > 0, _Fate.kept, _Fate.without_target).astype(np.uint8)
        if drops:
            self.fates[long] = _Fate.overlong
        self.fates[np.asarray(self.bad.samples, dtype=np.int64)] = _Fate.bad
        facts.truncated = int(np.count_nonzero(after[long]))
        self.sources = np.flatnonzero(after > 0)
        facts.samples, facts.dropped_without_target, facts.dropped_overlong, _ = counts_of(self.fates)
        facts.tokens = int(after.sum())
        facts.target_tokens = fitted.targets
        return fitted


def counts_of(fates: np.ndarray) -> list[int]:
    """Return the number of samples with each fate, in the order of `_Fate`."""
    return np.bincount(fates, minlength=len(_Fate)).tolist()


class HasPrompts(Protocol):
    """A dataset with prompts of its source."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...


def sample_prompts(dataset: HasPrompts, count: int) -> list[Prompt]:
    """Return up to `count` prompts of a dataset, evenly spaced."""
    return _spaced([prompt for prompt in dataset.prompts if prompt.calls is None], count)


def prompts_of_calls(dataset: HasPrompts, count: int) -> list[Prompt]:
    """Return up to `count` prompts whose answers are tool calls, evenly spaced.

    Raises ConfigError if there are none, or if their calls cannot be read from the texts that the template renders.
    """
    turns = [prompt for prompt in dataset.prompts if prompt.calls is not None]
    readable = [prompt for prompt in turns if prompt.calls]
    if count and not readable:
        reason = (
            "the held-out conversations have no answer with tool calls, or the first of them all follow prompts of "
            "seq_len tokens or more"
        )
        if turns:
            reason = (
                "the tool calls cannot be read from the text that the chat template renders; those in <tool_call>, "
                "after [TOOL_CALLS], as <function=NAME>, or as JSON with a name and arguments can"
            )
        raise ConfigError(f"generation.tool_calls={count}: {reason}; set it to 0, or change the data or the template")
    return _spaced(readable, count)


def _spaced(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]
