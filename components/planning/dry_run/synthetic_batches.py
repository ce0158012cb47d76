"""Micro-batches of a dry run: rows of training.seq_len tokens, collated by the data loader of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from components import data
from components.batch import Batch
from components.config.schema.data import LabelsDataConfig
from components.config.schema.objective import (
    DPOConfig,
    KTOConfig,
    PreferenceConfig,
    Reference,
    RewardConfig,
    ScoreConfig,
)
from components.config.schema.recipes import DistillConfig, TrainConfig, score_labels, section
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS
from components.data.pairs import DESIRABLE, PairedRows
from components.planning.dry_run.played_config import DOCUMENTS, STORED_TOKENS
from components.training.objectives.preference import REFERENCE


class _Tokenizer:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


def synthetic_batches(cfg: TrainConfig, mesh: Any) -> list[Batch]:
    """Return the micro-batches of one rank in the largest step of a run, on the host.

    Every row has training.seq_len tokens, and every token but the first is a target; under data.pack a row holds
    `DOCUMENTS` documents.

    Args:
        mesh: This rank's mesh.
    """
    training = cfg.training
    # All dp ranks have equal rows, so the share of one rank is built, and it repeats a few rows.
    plan = data.BatchPlan(
        global_batch_size=training.global_batch_size // mesh.size("dp"),
        micro_batch_size=training.micro_batch_size,
        padding=data.Padding(multiple=mesh.sequence_multiple),
    )
    rows = _rows(cfg)
    stored = isinstance(cfg, DistillConfig) and cfg.teacher.path is None
    return data.TrainBatches(rows, plan, seed=0, token_values=_StoredValues(rows) if stored else None).at(0)


class _StoredValues:
    """Values of a stored teacher's most likely tokens."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        """Return zeros for the targets of a row."""
        targets = np.count_nonzero(np.asarray(self._rows[index].labels[1:]) != data.IGNORED)
        return {
            TOKEN_IDS: np.zeros((targets, STORED_TOKENS), np.int32),
            LOG_PROBS: np.zeros((targets, STORED_TOKENS + 1), np.float32),
            TARGET_LOG_PROB: np.zeros(targets, np.float32),
        }


def _rows(cfg: TrainConfig) -> Any:
    """Return a dataset of one row, or of one pair of answers."""
    objective, seq_len, pack = (
        section(cfg, ScoreConfig) or section(cfg, PreferenceConfig),
        cfg.training.seq_len,
        cfg.data.pack,
    )
    if isinstance(objective, PreferenceConfig | RewardConfig):
        return _pairs(objective, seq_len, pack)
    samples = _samples([seq_len // DOCUMENTS] * DOCUMENTS if pack else [seq_len], seq_len)
    if isinstance(cfg.data, LabelsDataConfig):
        labels = np.zeros(len(samples), dtype=np.int64)
        samples = data.LabeledTexts(samples, labels, score_labels(cfg.data, objective) or ())
    return data.PackedDataset(samples, seq_len) if pack else samples


def _samples(lengths: Sequence[int], seq_len: int) -> data.Dataset:
    rows = [data.Example([1] * length, [1] * length) for length in lengths]
    return data.Dataset(rows, _Tokenizer(), facts=data.Facts("a dry run"), seq_len=seq_len)  # type: ignore[arg-type]


def _pairs(objective: PreferenceConfig | RewardConfig, seq_len: int, pack: bool) -> Any:
    count = DOCUMENTS if pack else 1
    length = 2 * seq_len // (2 * count) if pack else seq_len  # a packed row has 2 x seq_len tokens
    answers, indices = _samples([length] * count, seq_len), [(each, each) for each in range(count)]
    if isinstance(objective, RewardConfig):
        return data.ScoredPairs(answers, answers, indices)
    pairs: PairedRows = data.PairDataset(answers, answers, indices)
    values = torch.zeros(count, 2, dtype=torch.float64)
    if isinstance(objective, KTOConfig):
        pairs = pairs.with_values(DESIRABLE, values)
    if isinstance(objective, DPOConfig | KTOConfig) and objective.reference is Reference.precomputed:
        pairs = pairs.with_values(REFERENCE, values)
    return data.pack_pairs(pairs.to_be_packed(seq_len)) if pack else pairs
