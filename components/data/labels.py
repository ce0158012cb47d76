"""Data of score models: labeled texts, and preference pairs, each with a target at its last token.

transformers' sequence classification models score the last token that is not the pad token. A sample here is the text
up to that token, then one pad token. The label of a sample is the label of that pad token: labels are shifted by one
(`Batch.from_labels`), so it becomes the target at the scored token. Under causal attention the pad token affects no
score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from components.config.schema.data import LabelsDataConfig, PreferencesDataConfig, ScoredDataConfig
from components.data.dataset import Dataset, Facts
from components.data.examples import IGNORED, Example
from components.data.loading import build_dataset
from components.data.packing import PackedDataset
from components.data.pairs import PairDataset, build_pairs
from components.data.sources.rows import LabeledText
from components.data.sources.split import SourceSplit
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def scored_example(input_ids: Sequence[int], pad: int, label: int) -> Example:
    """Return a text as a sample whose only target, `label`, is at its last token that is not the pad token."""
    end = next((end for end in range(len(input_ids), 0, -1) if input_ids[end - 1] != pad), 1)
    return Example([*input_ids[:end], pad], [IGNORED] * end + [label])


class LabeledTexts(Dataset):
    """Texts with labels, in the order of their source.

    Args:
        texts: Samples of the texts, each followed by one more token.
        labels: Number of each sample's label, (samples,).
        names: Names of the labels.
    """

    item_name = "text"

    def __init__(self, texts: Dataset, labels: np.ndarray, names: Sequence[str]) -> None:
        self._texts, self._labels, self._names = texts, labels, names
        self._pad, self._tokenizer = _pad_token(texts), texts._tokenizer
        self.prompts, self.pad_token_id, self.sources = texts.prompts, texts.pad_token_id, texts.sources
        counts = Counter(labels.tolist())
        shares = ", ".join(f"{name} {counts[number] / len(labels):.0%}" for number, name in enumerate(names))
        few = f" ({shares})" if len(names) <= 10 else f" ({len(names)} labels)"
        self.facts: Facts = replace(
            texts.facts, source=f"{texts.facts.source}{few}", target_tokens=len(labels), unit="text"
        )

    def __len__(self) -> int:
        return len(self._texts)

    def item(self, index: int) -> Example:
        """Return the sample at `index`."""
        return scored_example(self._texts[index].input_ids[:-1], self._pad, int(self._labels[index]))

    @property
    def lengths(self) -> np.ndarray:
        """Largest possible length of each sample in tokens, (samples,) int64; pad tokens at its end are left out."""
        return self._texts.lengths

    def costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the costs of samples as rows, (indices,) float64."""
        return self._texts.costs(indices)

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and labels."""
        return xxhash.xxh3_128(f"{self._texts.fingerprint} {self._labels.tolist()}".encode()).hexdigest()

    def show(self, index: int) -> str:
        """Return the label and the text of a sample, with the scored token in [[ ]]."""
        return f"{self._names[int(self._labels[index])]}: {_shown(self._texts, self[index])}"


@dataclass(frozen=True)
class ScoredPairs(PairDataset):
    """Preference pairs whose answers each have one target, 0, at their last token."""

    def rows_of(self, index: int) -> tuple[Example, Example]:
        """Return the chosen and the rejected answer."""
        chosen, rejected = super().rows_of(index)
        pad = _pad_token(self.chosen)
        return scored_example(chosen.input_ids[:-1], pad, 0), scored_example(rejected.input_ids[:-1], pad, 0)

    @property
    def facts(self) -> Facts:
        """Statistics of the pairs, for the banner."""
        return replace(super().facts, target_tokens=2 * len(self))

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids of both answers, and of their pairing."""
        return xxhash.xxh3_128(f"scored {super().fingerprint}".encode()).hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a pair, with the scored tokens in [[ ]]."""
        chosen, rejected = self.rows_of(index)
        return f"chosen: {_shown(self.chosen, chosen)}\nrejected: {_shown(self.rejected, rejected)}"


def build_scored(
    cfg: ScoredDataConfig, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, split: Literal["train", "eval"]
) -> LabeledTexts | PackedDataset | ScoredPairs:
    """Read and tokenize the labeled texts or the preference pairs of the train split or the held-out split.

    A sample is a text of at most seq_len - 1 tokens, as one more token follows it. Cache, truncation, packing and
    the held-out split are those of `build_dataset`.

    Raises ConfigError if a file, column, row, label or split is invalid, or if no sample remains.
    """
    if isinstance(cfg, PreferencesDataConfig):
        pairs = build_pairs(cfg, tokenizer, seq_len=seq_len, split=split, kind=ScoredPairs)
        if not isinstance(pairs, ScoredPairs):
            raise TypeError("expected pairs of answers")
        return pairs
    if not isinstance(cfg, LabelsDataConfig):
        raise TypeError(f"build_scored: there is no reader for {type(cfg).__name__}")
    texts = build_dataset(replace(cfg, pack=False), tokenizer, seq_len=seq_len, split=split)
    if not isinstance(texts, Dataset):
        raise TypeError("expected an unpacked dataset of texts")
    records = SourceSplit(cfg, split == "eval")
    labels = np.asarray([record.label for record in records if isinstance(record, LabeledText)], dtype=np.int64)
    if len(texts.fates) != len(labels):
        raise ConfigError(f"data.path={cfg.path}: the source was changed while it was read; start the run again")
    labeled = LabeledTexts(texts, labels[texts.sources], cfg.labels)
    return PackedDataset(labeled, seq_len) if cfg.pack else labeled


def _pad_token(dataset: Dataset) -> int:
    if dataset.pad_token_id is None:
        raise ConfigError("model.tokenizer: the tokenizer has no pad token, which ends each text of a score model")
    return dataset.pad_token_id


def _shown(dataset: Dataset, example: Example) -> str:
    """Return the text of a sample, with its scored token in [[ ]]."""
    text, last = example.input_ids[:-1], len(example.input_ids) - 2
    return dataset.decode(Example(text, [IGNORED] * last + text[last:]))
