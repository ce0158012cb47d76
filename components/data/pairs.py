"""Preference pairs: a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import xxhash

from components.config.errors import ConfigError
from components.config.schema.data import PreferencesDataConfig, SftDataConfig, UnusedKeys
from components.data.dataset import Dataset, Facts, ItemSequence
from components.data.examples import Example
from components.data.loading import build_dataset
from components.data.sources.rows import unused_problem

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


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
    def prompts(self) -> Sequence[str]:
        """Raw prompts of the source."""
        return self.answers.prompts

    @property
    def pad_token_id(self) -> int | None:
        """Input id at padded positions."""
        return self.answers.pad_token_id

    def with_values(self, name: str, values: torch.Tensor) -> Self:
        """Return a copy with additional values (pairs, 2) of the two rows."""
        copied = copy.copy(self)
        object.__setattr__(copied, "values", {**self.values, name: values})
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
        return replace(
            chosen,
            source=f"pairs of {chosen.source}",
            samples=len(self),
            tokens=chosen.tokens + rejected.tokens,
            target_tokens=chosen.target_tokens + rejected.target_tokens,
            truncated=chosen.truncated + rejected.truncated,
            dropped_overlong=max(chosen.dropped_overlong, rejected.dropped_overlong),
            dropped_without_target=max(chosen.dropped_without_target, rejected.dropped_without_target),
        )

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and labels of both answers, and of their pairing."""
        parts = f"{self.chosen.fingerprint} {self.rejected.fingerprint} {list(self.indices)}"
        return xxhash.xxh3_128(parts.encode()).hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a pair, with the spans that contribute to the loss in [[ ]]."""
        chosen, rejected = self.indices[index]
        return f"chosen: {self.chosen.show(chosen)}\nrejected: {self.rejected.show(rejected)}"


def build_pairs(
    cfg: PreferencesDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    split: Literal["train", "eval"],
) -> PairDataset:
    """Read and tokenize the pairs of the train split or the held-out split.

    Each answer becomes a sample of `build_dataset`, with the prompt and the answer as response: the held-out prompts,
    chat template, cache and truncation to `seq_len` are the same. A pair is dropped if either sample is dropped.

    Raises ConfigError if a file, column, row or split is invalid, or if no pair remains.
    """
    chosen, rejected = (
        build_dataset(_sft(cfg, column), tokenizer, seq_len=seq_len, split=split)
        for column in (cfg.chosen_column, cfg.rejected_column)
    )
    if not (isinstance(chosen, Dataset) and isinstance(rejected, Dataset)):
        raise TypeError("expected unpacked datasets of the chosen and rejected answers")
    answer_columns = {f"column {cfg.chosen_column}", f"column {cfg.rejected_column}"}
    for dataset in (chosen, rejected):
        dataset.facts.unused = [name for name in dataset.facts.unused if name not in answer_columns]
    if chosen.facts.unused and cfg.unused_keys is UnusedKeys.refuse:
        raise ConfigError(unused_problem(chosen.facts.source, chosen.facts.unused))
    index_of = {source: index for index, source in enumerate(rejected.sources.tolist())}
    indices = [(i, index_of[source]) for i, source in enumerate(chosen.sources.tolist()) if source in index_of]
    if not indices:
        raise ConfigError(
            f"data.path={cfg.path}: there is no pair whose answers both fit seq_len={seq_len}; raise training.seq_len"
        )
    return PairDataset(chosen, rejected, indices)


def _sft(cfg: PreferencesDataConfig, column: str) -> SftDataConfig:
    """Return the config that reads the prompts and one column of answers."""
    return SftDataConfig(
        path=cfg.path,
        split=cfg.split,
        eval_path=cfg.eval_path,
        eval_split=cfg.eval_split,
        eval_fraction=cfg.eval_fraction,
        max_samples=cfg.max_samples,
        max_eval_samples=cfg.max_eval_samples,
        overlong=cfg.overlong,
        cache=cfg.cache,
        subset=cfg.subset,
        revision=cfg.revision,
        prompt_column=cfg.prompt_column,
        response_column=column,
        system_prompt=cfg.system_prompt,
    )
