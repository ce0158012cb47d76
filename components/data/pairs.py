"""Preference pairs, a chosen and a rejected answer to the same prompt, also packed into rows; and labeled answers."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import xxhash

from components.config.schema.data import PreferencesDataConfig
from components.conversation import Conversation, Prompt
from components.data.dataset import Dataset, Facts, ItemSequence, counts_of
from components.data.examples import IGNORED, Example, PackedRow
from components.data.loading import build_dataset, no_samples_problem, refuse_bad_rows
from components.data.packing import documents_size, plan_rows
from components.data.sources.columns import AnswerConfig, answer_configs, fitted
from components.data.sources.rows import BadRowReport, no_good_row
from components.data.sources.split import SourceSplit, columns_at, location_of
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch


class RowPair(NamedTuple):
    """Two rows that are always in the same batch."""

    first: Example
    """The chosen answer, or a labeled answer."""
    second: Example
    """The rejected answer, or the prompt of a labeled answer with the answer of another sample."""
    values: Mapping[str, tuple[float, float]]
    """Values of the two rows by name; they become `Batch.rows`."""


EMPTY_EXAMPLE = Example([], [])


class PairedRows(ItemSequence[RowPair]):
    """Base of the data sets of recipes/dpo.py."""

    item_name = "pair"
    values: Mapping[str, torch.Tensor]  # each (pairs, 2) float64
    """Values of both rows by name, such as log-probabilities under a reference model."""
    packed_seq_len: int | None = None
    """Maximum length of an answer with its prompt if `packed_pairs.pack_pairs` shall pack the pairs (data.pack)."""

    @abstractmethod
    def rows_of(self, index: int) -> tuple[Example, Example]:
        """Return the two rows of the pair at `index`."""

    @property
    @abstractmethod
    def answers(self) -> Dataset:
        """The answers of the first rows."""

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """Statistics of the pairs, for the banner."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of all token ids and labels of both rows, and of their pairing."""

    @abstractmethod
    def show(self, index: int) -> str:
        """Return the texts of a pair, with the spans that contribute to the loss in [[ ]]."""

    def item(self, index: int) -> RowPair:
        """Return the pair at `index`."""
        values = {name: (float(each[index, 0]), float(each[index, 1])) for name, each in self.values.items()}
        return RowPair(*self.rows_of(index), values)

    @property
    def empty(self) -> RowPair:
        """Pair of two padding rows, with zero for every named value."""
        return RowPair(EMPTY_EXAMPLE, EMPTY_EXAMPLE, dict.fromkeys(self.values, (0.0, 0.0)))

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts of the source."""
        return self.answers.prompts

    @property
    def pad_token_id(self) -> int | None:
        """Input id at padded positions."""
        return self.answers.pad_token_id

    def with_values(self, name: str, values: torch.Tensor) -> Self:
        """Return a copy with additional values (pairs, 2) of the two rows."""
        return self._with(values={**self.values, name: values})

    def to_be_packed(self, seq_len: int) -> Self:
        """Return a copy that `pack_pairs` packs. seq_len: Maximum length of an answer with its prompt."""
        return self._with(packed_seq_len=seq_len)

    def _with(self, **changes: object) -> Self:
        copied = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(copied, name, value)
        return copied


@dataclass(frozen=True)
class PairDataset(PairedRows):
    """Preference pairs in the order of their source."""

    chosen: Dataset
    rejected: Dataset
    indices: Sequence[tuple[int, int]]
    """Indices of each pair's samples in `chosen` and in `rejected`."""
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)

    def rows_of(self, index: int) -> tuple[Example, Example]:
        """Return the chosen and the rejected answer."""
        chosen, rejected = self.indices[index]
        return self.chosen[chosen], self.rejected[rejected]

    @property
    def answers(self) -> Dataset:
        """The chosen answers."""
        return self.chosen

    @property
    def facts(self) -> Facts:
        """Statistics of the pairs, for the banner."""
        chosen, rejected = self.chosen.facts, self.rejected.facts
        paired, without_target, overlong, _ = counts_of(np.maximum(self.chosen.fates, self.rejected.fates))
        tokens = target_tokens = 0
        for answers, indices in zip(
            (self.chosen, self.rejected), np.array(self.indices, dtype=int).reshape(-1, 2).T, strict=True
        ):
            tokens += int(answers.lengths[indices].sum())
            dropped = set(range(len(answers))).difference(indices.tolist())
            target_tokens += answers.facts.target_tokens - sum(_count_targets(answers[index]) for index in dropped)
        return replace(
            chosen,
            unit="pair",
            samples=len(self),
            tokens=tokens,
            target_tokens=target_tokens,
            truncated=chosen.truncated + rejected.truncated,
            dropped_overlong=overlong,
            dropped_without_target=without_target,
            dropped_equal=paired - len(self),
            dropped_bad_rows=self.bad.count,
        )

    @property
    def bad(self) -> BadRowReport:
        """Rows that are no pair of two samples."""
        bad = BadRowReport()
        bad.add({**self.rejected.bad.problems, **self.chosen.bad.problems}, self.chosen.bad.count)
        bad.count += len(set(self.rejected.bad.samples).difference(self.chosen.bad.samples))
        return bad

    @property
    def is_distinct(self) -> list[bool]:
        """Whether the two rows of each pair differ. The loss of equal rows is a constant without a gradient."""
        return [first != second for first, second in map(self.rows_of, range(len(self)))]

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and labels of both answers, and of their pairing."""
        parts = f"{self.chosen.fingerprint} {self.rejected.fingerprint} {list(self.indices)}"
        return xxhash.xxh3_128(parts.encode()).hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a pair, with the spans that contribute to the loss in [[ ]]."""
        chosen, rejected = self.indices[index]
        return f"chosen: {self.chosen.show(chosen)}\nrejected: {self.rejected.show(rejected)}"


DESIRABLE = "desirable"
"""Name in `Batch.rows` of the label of each row's answer: 1 if it is desirable, else 0."""


@dataclass(frozen=True)
class _LabeledDataset(PairedRows):
    """Labeled answers in the order of their source, each paired with its prompt followed by another prompt's answer.

    KTO estimates the KL divergence from these mismatched answers.
    """

    item_name = "answer"
    labeled: Dataset
    values: Mapping[str, torch.Tensor]
    """Contains `DESIRABLE`."""
    mismatched: Sequence[int]
    """Index of the sample whose answer each sample is paired with: the next one with another prompt."""
    seq_len: int
    """Mismatched answers are cut to this number of tokens with their prompts."""

    def __len__(self) -> int:
        return len(self.labeled)

    def rows_of(self, index: int) -> tuple[Example, Example]:
        """Return the labeled answer, and its prompt with another prompt's answer."""
        own, other = self.labeled[index], self.labeled[self.mismatched[index]]
        prompt, answer = _answer_start(own), _answer_start(other)
        mismatched = Example(
            (own.input_ids[:prompt] + other.input_ids[answer:])[: self.seq_len],
            ([IGNORED] * prompt + other.labels[answer:])[: self.seq_len],
        )
        return own, mismatched

    @property
    def answers(self) -> Dataset:
        """The labeled answers."""
        return self.labeled

    @property
    def facts(self) -> Facts:
        """Statistics of the labeled answers, for the banner."""
        share = float(self.values[DESIRABLE][:, 0].mean())
        facts = self.labeled.facts
        return replace(facts, source=f"{facts.source}, {share:.0%} of the answers desirable", unit="answer")

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and labels, and of the length that mismatched answers are cut to."""
        labels = self.values[DESIRABLE][:, 0].int().tolist()
        return xxhash.xxh3_128(f"{self.labeled.fingerprint} {labels} {self.seq_len}".encode()).hexdigest()

    def show(self, index: int) -> str:
        """Return the text of an answer, with the spans that contribute to the loss in [[ ]]."""
        label = "desirable" if self.values[DESIRABLE][index, 0] else "undesirable"
        return f"{label}: {self.labeled.show(index)}"


def _count_targets(example: Example) -> int:
    """Return the number of targets of a sample."""
    return len(example.labels) - example.labels.count(IGNORED)


def _answer_start(example: Example) -> int:
    return next(i for i, label in enumerate(example.labels) if label != IGNORED)


def build_pairs(
    cfg: PreferencesDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    split: Literal["train", "eval"],
    kind: type[PairDataset] = PairDataset,
) -> PairedRows:
    """Read and tokenize the preference pairs, or the labeled answers, of the train split or the held-out split.

    Each answer becomes a sample of `build_dataset` with its prompt: the held-out prompts, chat template, cache and
    truncation to `seq_len` are the same. A pair is dropped if either sample is dropped, or if both are equal. `kind` is
    the class of pairs of answers; `labels.ScoredPairs` are those of a score head.

    Raises ConfigError if a file, column, row or split is invalid, or if no pair remains.
    """
    location = location_of(cfg, split == "eval")
    columns = columns_at(cfg, location)
    try:
        answers = answer_configs(cfg, columns, location.path)
    except ConfigError as error:
        raise ConfigError(fitted(error.problems, cfg, location.key, columns)) from error
    if cfg.label_column is None:
        pairs: PairedRows = _build_preferences(answers, tokenizer, seq_len, split, kind)
    else:
        pairs = _build_labeled(answers, tokenizer, seq_len, split)
    return pairs.to_be_packed(seq_len) if cfg.pack else pairs


def _build_preferences(
    answers: Sequence[AnswerConfig],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    split: Literal["train", "eval"],
    kind: type[PairDataset],
) -> PairedRows:
    configs = [replace(answer, is_scored=kind is not PairDataset) for answer in answers]
    chosen, rejected = (_build_answers(config, tokenizer, seq_len, split) for config in configs)
    if len(chosen.fates) != len(rejected.fates):
        raise ConfigError(f"data.path={answers[0].path}: the source was changed while it was read; start the run again")
    refuse_bad_rows(configs, (chosen, rejected), tokenizer, seq_len, split == "eval")
    if len(chosen.fates) == 0:
        raise ConfigError(no_samples_problem(configs[0], chosen, seq_len, split == "eval"))
    index_of = {source: index for index, source in enumerate(rejected.sources.tolist())}
    indices = [(i, index_of[source]) for i, source in enumerate(chosen.sources.tolist()) if source in index_of]
    pairs = kind(chosen, rejected, indices)
    pairs = replace(pairs, indices=list(compress(indices, pairs.is_distinct)))
    if not pairs.indices:
        raise ConfigError(_no_pairs_problem(pairs, seq_len))
    return pairs


def _no_pairs_problem(pairs: PairDataset, seq_len: int) -> str:
    facts = pairs.facts
    if facts.truncated or facts.dropped_overlong or facts.dropped_without_target:
        remedy = f"seq_len={seq_len} is too short; raise training.seq_len (in evaluate.py evaluation.seq_len)"
    elif facts.dropped_equal:
        remedy = (
            "the chat template renders both answers of each pair alike; correct the rows, or set "
            "model.chat_template to another one"
        )
    else:
        return no_good_row(facts.source, pairs.bad)
    return f"{facts}: no pair remains: {remedy}"


def _build_labeled(
    answers: Sequence[AnswerConfig],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    split: Literal["train", "eval"],
) -> PairedRows:
    import torch

    (cfg,) = answers
    labeled = _build_answers(cfg, tokenizer, seq_len, split)
    mismatched = _next_with_another_prompt(labeled)
    if mismatched is None:
        raise ConfigError(
            f"data.label_column={cfg.label_column}: {labeled.facts.source} has a single prompt; objective=kto compares "
            "answers with those of other prompts, add samples or raise data.eval_fraction"
        )
    rows = SourceSplit(cfg, split == "eval")
    labels = [float(bool(row.is_desirable)) for row in rows if isinstance(row, Conversation)]
    kept = torch.tensor(labels, dtype=torch.float64)[torch.from_numpy(labeled.sources)]
    return _LabeledDataset(labeled, {DESIRABLE: kept[:, None].expand(-1, 2)}, mismatched, seq_len)


def _next_with_another_prompt(dataset: Dataset) -> list[int] | None:
    """Return the index of the next sample with another prompt for each sample, cyclically; None if there is none."""
    prompts = [hash(tuple(sample.input_ids[: _answer_start(sample)])) for sample in dataset]
    count = len(prompts)
    following = [-1] * (2 * count + 1)
    for index in range(2 * count - 1, -1, -1):
        same = prompts[index % count] == prompts[(index + 1) % count]
        following[index] = following[index + 1] if same else (index + 1) % count
    return following[:count] if -1 not in following[:count] else None


def _build_answers(
    cfg: AnswerConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, split: Literal["train", "eval"]
) -> Dataset:
    dataset = build_dataset(cfg, tokenizer, seq_len=seq_len, split=split)
    if not isinstance(dataset, Dataset):
        raise TypeError("expected an unpacked dataset of answers")
    return dataset


class PackedPairRow(NamedTuple):
    """A row of several pairs. Documents 2i and 2i + 1 are the first and the second answer of its pair i."""

    row: PackedRow
    values: Mapping[str, list[float]]
    """Values of the documents by name; they become `Batch.rows`."""


def with_sequences(batch: Batch, rows: Sequence[PackedPairRow], documents: int) -> Batch:
    """Return the batch of packed pairs as one whose sequences are the `documents` of a row."""
    import torch

    last = documents - 1  # no document of answers has this index, so its sequence has no targets
    ids = torch.full_like(batch.input_ids, last)  # (micro_batch, seq)
    values = {name: torch.zeros(len(rows), documents, dtype=torch.float64) for name in rows[0].values}
    for i, each in enumerate(rows):
        starts = [0, *each.row.ends]
        for document, (start, end) in enumerate(zip(starts, each.row.ends, strict=False)):
            ids[i, start:end] = document
        for name, of_documents in each.values.items():
            values[name][i, : len(of_documents)] = torch.tensor(of_documents, dtype=torch.float64)
    return replace(batch, sequence_ids=ids, sequences=documents, rows=values)


class PackedPairs(ItemSequence[PackedPairRow]):
    """The pairs of a data set packed into rows of 2 x `seq_len` tokens, which hold the longest pair.

    The two answers of a pair are in the same row, and so in the same micro-batch. The rows are the same on every rank
    and for every seed. The order shuffles rows, and batch sizes count rows.
    """

    item_name = "row of pairs"

    def __init__(self, pairs: PairedRows, seq_len: int) -> None:
        self.pairs, self.seq_len = pairs, 2 * seq_len
        """`seq_len`: Tokens of a row."""
        answers = [pairs.rows_of(index) for index in range(len(pairs))]
        lengths = [len(first.input_ids) + len(second.input_ids) for first, second in answers]
        self._plan = plan_rows(lengths, self.seq_len)
        most = 2 * int(np.diff(self._plan.starts).max())
        self.documents = documents_size(most)
        """Size of per-document tensors, an even number that includes the document of padding."""
        self.facts: Facts = replace(
            pairs.facts,
            samples=2 * len(pairs),
            tokens=sum(lengths),
            rows=len(self),
            row_tokens=self.seq_len,
            max_documents=most,
        )

    def __len__(self) -> int:
        return len(self._plan.starts) - 1

    def item(self, index: int) -> PackedPairRow:
        """Return the row at `index`."""
        row, values = PackedRow([], [], []), self.empty.values
        for number in self._pairs_of(index):
            pair = self.pairs[number]
            for answer in (pair.first, pair.second):
                row.input_ids.extend(answer.input_ids)
                row.labels.extend(answer.labels)
                row.ends.append(len(row.input_ids))
            for name, (first, second) in pair.values.items():
                values[name].extend((first, second))
        return PackedPairRow(row, values)

    @property
    def empty(self) -> PackedPairRow:
        """Row of padding."""
        return PackedPairRow(PackedRow([], [], []), {name: [] for name in self.pairs.values})

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts of the source."""
        return self.pairs.prompts

    @property
    def pad_token_id(self) -> int | None:
        """Input id at padded positions."""
        return self.pairs.pad_token_id

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, labels and the assignment of pairs to rows."""
        digest = xxhash.xxh3_128(f"{self.pairs.fingerprint} {self.seq_len}".encode())
        digest.update(self._plan.documents.tobytes())
        digest.update(self._plan.starts.tobytes())
        return digest.hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a row's pairs, with the spans that contribute to the loss in [[ ]]."""
        return "\n--- next pair ---\n".join(self.pairs.show(pair) for pair in self._pairs_of(index))

    def _pairs_of(self, row: int) -> list[int]:
        starts = self._plan.starts
        return self._plan.documents[starts[row] : starts[row + 1]].tolist()


def pack_pairs(pairs: PairedRows) -> PairedRows | PackedPairs:
    """Return the pairs in packed rows if they were read with data.pack, else unchanged."""
    return pairs if pairs.packed_seq_len is None else PackedPairs(pairs, pairs.packed_seq_len)
