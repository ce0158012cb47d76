"""Construction of tokenized datasets from the `data` section of a config, and mixtures of several by weight."""

from __future__ import annotations

import pkgutil
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate, compress
from math import gcd, lcm
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from components.config.kinds import of_source
from components.config.schema.data import (
    BadRows,
    ChatDataConfig,
    CustomDataConfig,
    DataConfig,
    DocsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
    TokensDataConfig,
    UnusedKeys,
)
from components.conversation import Prompt
from components.data.cache import TokenizedSplit, tokenize
from components.data.dataset import LINEAR_TOKENS, Dataset, Facts, ItemSequence, MixtureFacts, Tokens
from components.data.examples import IGNORED, Example, PackedRow
from components.data.packing import BlockOrder, PackedDataset
from components.data.sources.columns import AnswerConfig
from components.data.sources.rows import BadRowReport, no_good_row, refused_rows, unused_problem
from components.data.sources.split import (
    SourceSplit,
    describe,
    hash_of_prompt,
    held_out_by_hash,
    holds_out,
    sample_limit,
    split_mask,
    split_of,
)
from components.data.token_store.rows import TokenRows, build_rows
from components.protocol.errors import ConfigError, raise_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = Dataset | PackedDataset | TokenRows
_CONVERSATIONS = (ChatDataConfig, DocsDataConfig, PreferencesDataConfig, SftDataConfig)
"""Data that the chat template renders."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Infinite deterministic stream of source indices, in proportion to the weights and without state.

    The sources form a binary tree of halves. Each split assigns to its left half the positions at which
    floor(n x share + phase) increases (a Beatty sequence), so the number of earlier occurrences at any position is one
    integer division per split. After n positions, a source has occurred n x share times, with an error of less than one
    per split on its path: less than 1 for two sources, 2 for four, 3 for eight.
    """

    weights: tuple[int, ...]
    """Integer weights of the sources. One of weight 0 does not occur and does not affect the others."""
    seed: int
    """Seed of the phase of each split."""

    def at(self, position: int) -> tuple[int, int]:
        """Return the source at `position`, and the number of its earlier occurrences."""
        drawn = self._drawn
        first, last, offset = 0, len(drawn), position
        while last - first > 1:
            middle = (first + last) // 2
            before = self._count_left(first, middle, last, offset)
            after = self._count_left(first, middle, last, offset + 1)
            if after > before:
                last, offset = middle, before
            else:
                first, offset = middle, offset - before
        return drawn[first], offset

    def counts(self, positions: int) -> list[int]:
        """Return how often each source occurs at the first `positions` positions."""
        counts, drawn = [0] * len(self.weights), self._drawn
        halves = [(0, len(drawn), positions)]
        while halves:
            first, last, count = halves.pop()
            if last - first == 1:
                counts[drawn[first]] = count
                continue
            middle = (first + last) // 2
            left = self._count_left(first, middle, last, count)
            halves += [(first, middle, left), (middle, last, count - left)]
        return counts

    @property
    def _drawn(self) -> list[int]:
        """Sources with a weight, which the tree divides."""
        return [source for source, weight in enumerate(self.weights) if weight]

    def _count_left(self, first: int, middle: int, last: int, positions: int) -> int:
        """Return how many of the first `positions` of the drawn sources [first, last) belong to [first, middle)."""
        weights = [weight for weight in self.weights if weight]
        left, both = sum(weights[first:middle]), sum(weights[first:last])
        return (positions * left + _hashed(self.seed, f"{first}:{last}") % both) // both


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """Infinite stream of row indices of a `MixtureDataset`, a pure function of (seed, position).

    `Shares` selects the source at a position. Each source has its own `BlockOrder`, which depends only on the seed and
    the source's name, and starts a new epoch when all its rows were used. So no row repeats within an epoch of its
    source, any position costs microseconds, and a source's order does not depend on the other sources. If the shares
    change at a position, each source continues after the rows that it had until then.
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
    changes: tuple[tuple[int, Shares], ...] = ()
    """Ascending positions from which on other shares apply."""

    @property
    def size(self) -> int:
        """Total rows of all sources. After this many positions some rows may have repeated and others not occurred."""
        return sum(self.sizes)

    def at(self, position: int) -> int:
        """Return the row index at `position` (0-based); indices run over the concatenated sources."""
        (start, shares), before = self._shares_at(position)
        source, offset = shares.at(position - start)
        offset += before[source]
        block, window = self.blocks[source] if self.blocks else (1, 1)
        order = BlockOrder(self.sizes[source], _hashed(self.seed, self.names[source]), block, window)
        return sum(self.sizes[:source]) + order.at(offset)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the row indices at `count` positions from `start`."""
        return [self.at(position) for position in range(start, start + count)]

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first `positions` rows are of each source."""
        (start, shares), before = self._shares_at(positions)
        return [earlier + count for earlier, count in zip(before, shares.counts(positions - start), strict=True)]

    def drawn(self, positions: int) -> dict[str, int]:
        """Return the rows of each source among the first `positions` rows, by name."""
        return dict(zip(self.names, self.counts(positions), strict=True))

    def check_drawn(self, before: Mapping[str, int], positions: int, steps: int) -> None:
        """Raise ConfigError if the rows of a run's first `steps` steps, by source, were others than here."""
        drawn = self.drawn(positions)
        if any(drawn.get(name, 0) != count for name, count in before.items()):
            rows = [", ".join(f"{count:,} of {name}" for name, count in each.items()) for each in (before, drawn)]
            raise ConfigError(
                f"data.stages: in the {steps} steps that are done the run drew {rows[0]} rows, but with these stages "
                f"it would have drawn {rows[1]}; keep the stages that have begun, with their weights"
            )

    def _shares_at(self, position: int) -> tuple[tuple[int, Shares], list[int]]:
        """Return the shares at a position with that of their first row, and the rows of each source before that."""
        current, before = (0, self.shares), [0] * len(self.sizes)
        for change in self.changes:
            if position < change[0]:
                break
            counts = current[1].counts(change[0] - current[0])
            current, before = change, [earlier + count for earlier, count in zip(before, counts, strict=True)]
        return current, before


class MixtureDataset(ItemSequence[Example | PackedRow]):
    """Concatenation of the rows of several sources; `order` mixes them.

    Sources are sorted by name, independent of their order in the config.
    """

    def __init__(self, parts: Mapping[str, Part], weights: Mapping[str, float] | None = None) -> None:
        """Concatenate `parts` (datasets by name); `weights` by name, or None for held-out rows."""
        self.parts = dict(sorted(parts.items()))
        self._weights = None if weights is None else _integer_weights([weights[name] for name in self.parts])
        self._ends = list(accumulate(map(len, self.parts.values())))
        self.pad_token_id = next(iter(self.parts.values())).pad_token_id
        """Input id at padded positions."""

    def __len__(self) -> int:
        return self._ends[-1]

    def item(self, index: int) -> Example | PackedRow:
        """Return the row at `index` of the concatenation."""
        part, row = self._place_of(index)
        return part[row]

    def costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the costs of rows, (indices,) float64; those of token stores as if each held one document."""
        whole = float(self.seq_len) * (self.seq_len + LINEAR_TOKENS)
        places = [self._place_of(int(index)) for index in indices]
        return np.array([whole if isinstance(part, TokenRows) else part.costs([row])[0] for part, row in places])

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

    def order(self, seed: int, stages: Iterable[tuple[int, Mapping[str, float]]] = ()) -> MixtureOrder:
        """Return the training order of the rows.

        Args:
            stages: Position of the first row of each stage of the run, from 0 on, and its weights by source; without
                weights, those of the dataset apply. Stages with the same shares continue each other.
        """
        own = self._weights or (1,) * len(self.parts)
        shares = [(0, Shares(own, seed))]
        for start, named in stages:
            weights = _integer_weights([named.get(name, 0.0) for name in self.parts]) if named else own
            if start == 0 or weights != shares[-1][1].weights:
                shares = [each for each in shares if each[0] < start] + [(start, Shares(weights, seed))]
        sizes = tuple(map(len, self.parts.values()))
        blocks = tuple(part.blocks if isinstance(part, TokenRows) else (1, 1) for part in self.parts.values())
        return MixtureOrder(sizes, tuple(self.parts), shares[0][1], seed, blocks, tuple(shares[1:]))

    def show(self, index: int) -> str:
        """Return the text of an example row, alternating between sources, with the loss spans in [[ ]]."""
        round_, number = divmod(index, len(self.parts))
        name, part = list(self.parts.items())[number]
        return f"{name}: {part.show(round_ % len(part))}"


def sources_of(dataset: Part | MixtureDataset) -> dict[str, Part]:
    """Return the sources of a mixture by name; empty for other datasets."""
    return dataset.parts if isinstance(dataset, MixtureDataset) else {}


def _integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of `weights`, which are taken as exact decimals (0.1 is 1/10)."""
    exact = [Fraction(str(weight)) for weight in weights]
    scaled = [int(each * lcm(*(other.denominator for other in exact))) for each in exact]
    return tuple(each // gcd(*scaled) for each in scaled)


def _hashed(seed: int, text: str) -> int:
    return int.from_bytes(blake2b(f"{seed}:{text}".encode(), digest_size=8).digest(), "big")


def build_dataset(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, split: Literal["train", "eval"]
) -> Dataset | PackedDataset | TokenRows | MixtureDataset:
    """Read and tokenize the samples of the train or eval split; pack them into rows if `data.pack` is set.

    The result depends only on the arguments and the files: every process calls this function and gets the same
    samples, concurrently or one after another. Tokens are cached in `data.cache`, where one process writes what the
    others read. For hub datasets, `datasets` fills its own cache under file locks.

    Without an eval split or path, `data.eval_fraction` of the training source is held out, selected by a hash
    of the prompt. The selection does not depend on the seed, the order of rows or the world size, and equal prompts
    are in the same split. `data.max_samples` and `data.max_eval_samples` keep the first samples of a split. Each
    source of a mixture has its own held-out samples and is packed separately.

    Raises ConfigError if a file, column, row or split is invalid, or if no sample with a target remains.
    """
    if not isinstance(cfg, MixtureDataConfig):
        return _build_source(cfg, tokenizer, seq_len, split == "eval")
    parts, problems = {}, []
    for name, source in cfg.sources.items():
        if split == "eval" and not holds_out(source):
            continue
        try:
            parts[name] = _build_source(
                replace(source, pack=cfg.pack, cache=cfg.cache), tokenizer, seq_len, split == "eval"
            )
        except ConfigError as error:
            problems += of_source(name, error.problems)
    if not parts and not problems:
        problems.append(
            "data.sources: no source has held-out samples; to evaluate, set data.sources.NAME.eval_fraction of one"
        )
    raise_all(problems)
    weights = {name: source.weight or 1.0 for name, source in cfg.sources.items()}
    return MixtureDataset(parts, weights if split == "train" else None)


def _build_source(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, is_eval: bool
) -> Dataset | PackedDataset | TokenRows:
    if isinstance(cfg, TokensDataConfig):
        return build_rows(cfg, tokenizer, seq_len=seq_len, is_eval=is_eval)
    facts = Facts(source=describe(cfg, is_eval))
    examples: Iterable[Example] | Tokens
    bad = BadRowReport()
    prompts: list[Prompt] = []
    if isinstance(cfg, CustomDataConfig):
        all_examples = _custom_examples(cfg, tokenizer, seq_len, is_eval)
        hashes = array("Q", map(hash_of_prompt, all_examples) if held_out_by_hash(cfg) else [0] * len(all_examples))
        examples = compress(all_examples, split_mask(hashes, cfg, is_eval))
    else:
        source = SourceSplit(cfg, is_eval)
        examples, prompts, bad, facts.unused, facts.notes, facts.cut_to_turns = tokenize(
            source, cfg, tokenizer, seq_len
        )
        if isinstance(cfg, _CONVERSATIONS) and not tokenizer.chat_template:
            facts.notes.append(
                "the tokenizer has no chat template: messages are joined with line breaks, without roles"
            )
        facts.notes = [*facts.notes, *source.folder_notes]
        if facts.unused and isinstance(cfg, RowsDataConfig) and cfg.unused_keys is UnusedKeys.refuse:
            raise ConfigError(unused_problem(facts.source, facts.unused))
    dataset = Dataset(
        examples,
        tokenizer,
        facts=facts,
        seq_len=seq_len,
        overlong=cfg.overlong,
        prompts=prompts,
        bad=bad,
    )
    if not (isinstance(cfg, AnswerConfig) and cfg.label_column is None):  # the answers of pairs are checked together
        if isinstance(cfg, RowsDataConfig):
            refuse_bad_rows([cfg], [dataset], tokenizer, seq_len, is_eval)
        if len(dataset) == 0:
            raise ConfigError(no_samples_problem(cfg, dataset, seq_len, is_eval))
    return PackedDataset(dataset, seq_len) if cfg.pack else dataset


def refuse_bad_rows(
    cfgs: Sequence[RowsDataConfig],
    found: Sequence[Dataset],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    is_eval: bool,
) -> None:
    """Raise ConfigError for `data.bad_rows=refuse` with the bad rows of a source, in both of its splits, if it has any.

    Args:
        cfgs: Configs that read the same rows, such as those of both answers of pairs.
        found: The dataset of each.
    """
    if cfgs[0].bad_rows is BadRows.drop or not any(each.bad.count for each in found):
        return
    bad, others = BadRowReport(), len(found[0].fates)
    bad.add({}, found[0].bad.count - len(found[0].bad.samples))  # the same rows for all configs
    splits: list[Sequence[Dataset | TokenizedSplit]] = [found]
    has_other = holds_out(cfgs[0]) and held_out_by_hash(cfgs[0]) and sample_limit(cfgs[0], not is_eval) is None
    if has_other and not isinstance(cfgs[0], TextDataConfig):
        other = [tokenize(SourceSplit(cfg, not is_eval), cfg, tokenizer, seq_len) for cfg in cfgs]
        others += len(other[0].tokens.starts)
        splits.append(other)
    for split in splits:
        problems = {where: each.bad.problems[where] for each in reversed(split) for where in each.bad.problems}
        rejected = len(set().union(*(each.bad.samples for each in split)))
        bad.add(problems, rejected)
        others -= rejected
    raise ConfigError(refused_rows(bad, others))


def _custom_examples(
    cfg: CustomDataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, is_eval: bool
) -> list[Example]:
    try:
        factory = pkgutil.resolve_name(cfg.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.factory={cfg.factory}: cannot be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"data.factory={cfg.factory}: is a {type(factory).__name__}, not a function")
    examples = []
    for number, (ids, labels) in enumerate(factory(tokenizer, seq_len, split_of(cfg, is_eval))):
        if len(ids) != len(labels):
            raise ConfigError(
                f"data.factory={cfg.factory}: sample {number} has {len(ids)} input_ids and "
                f"{len(labels)} labels; labels must be aligned with input_ids, with -100 for ignored targets"
            )
        examples.append(_checked(f"data.factory={cfg.factory}: sample {number}", ids, labels, len(tokenizer)))
    return examples


def _checked(where: str, ids: Sequence[int], labels: Sequence[int], size: int) -> Example:
    """Validate the values of a sample against a vocabulary of `size` tokens.

    Any other mark than IGNORED would be trained on as a token id, or fail later with a device-side assertion.
    """
    inputs, targets = (np.asarray(values, dtype=np.int64) for values in (ids, labels))  # (seq,) each
    or_ignored = f"{IGNORED} (ignored), or "
    for name, values, alternative in (("input_ids", inputs, ""), ("labels", targets[targets != IGNORED], or_ignored)):
        if len(invalid := values[(values < 0) | (values >= size)]):
            raise ConfigError(
                f"{where} has {invalid[0]} among its {name}; must be {alternative}at least 0 and below {size:,}, the "
                "size of the tokenizer's vocabulary"
            )
    return Example(inputs.tolist(), targets.tolist())


def no_samples_problem(cfg: DataConfig, dataset: Dataset, seq_len: int, is_eval: bool) -> str:
    facts = dataset.facts
    if is_eval and not holds_out(cfg):
        return (
            "data.eval_fraction=0: there are no held-out samples; "
            "to evaluate, set it, data.eval_split or data.eval_path"
        )
    if dataset.bad.samples and len(dataset.bad.samples) == len(dataset.fates):
        other = ", or raise data.eval_fraction" if is_eval and held_out_by_hash(cfg) else ""
        return no_good_row(facts.source, dataset.bad, f"correct these{other}")
    if facts.dropped_without_target or facts.dropped_overlong:
        flags = isinstance(cfg, ChatDataConfig) and facts.dropped_without_target
        return (
            f"seq_len={seq_len}: too short for every sample{', or no message is trained on' * bool(flags)} ({facts}); "
            "raise training.seq_len (in evaluate.py evaluation.seq_len)"
            f"{', or correct the flags of the messages, such as loss or train' * bool(flags)}"
        )
    other = "data.eval_split or data.eval_path" if isinstance(cfg, RowsDataConfig) else "data.eval_split"
    if isinstance(cfg, CustomDataConfig):
        other += " (such as eval, which calls data.factory with this split)"
    return (
        f"{facts}: too few samples; holding out data.eval_fraction={cfg.eval_fraction} requires at least two different "
        f"prompts; add samples, or set {other}"
    )
