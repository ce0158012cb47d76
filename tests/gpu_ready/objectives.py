"""The objectives of the recipes for `cases.py`: the objective, its rows, and the outputs of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from components import data, training
from components.config.schema import DistillConfig, DpoConfig, ModelConfig, RewardConfig
from components.config.schema.data import IGNORED, DocsDataConfig, PreferencesDataConfig
from components.config.schema.objective import (
    DAPOConfig,
    DistillationConfig,
    DPOConfig,
    KTOConfig,
    Reference,
    TeacherConfig,
)
from components.config.schema.rollouts import RolloutsConfig
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS
from components.data.dataset import Facts
from components.data.pairs import DESIRABLE
from components.distributed.mesh import Mesh
from components.models.tokenizer import byte_tokenizer
from components.training.objectives.policy import ADVANTAGE, OLD, REFERENCE_TOKENS, WEIGHT, TokenPolicy
from components.training.objectives.preference import REFERENCE
from components.training.objectives.teacher import StoredDistillation, _hidden_states_of
from tests.distributed.packed import SEQ_LEN, unpacked

LABELS = {"classification": ["a", "b", "c"], "reward": ["reward"]}
"""Outputs of the score head by objective; the others train a causal LM."""
DOCUMENTS = 8
"""Documents of a full packed row."""
PREFERENCES = {
    "dpo": DPOConfig(reference=Reference.precomputed),
    "dpo_adapters_off": DPOConfig(reference=Reference.adapters_off),
    "kto": KTOConfig(reference=Reference.precomputed),
}


class PadOnlyTokenizer:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


class StoredZeros:
    """Stored values of a teacher, all zero: 9 tokens for each target; or those of sampled answers."""

    def __init__(self, rows: Any, sampled: bool = False) -> None:
        self._rows, self._sampled = rows, sampled

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        count = sum(label != IGNORED for label in self._rows[index].labels[1:])
        if self._sampled:
            return dict.fromkeys((ADVANTAGE, OLD, REFERENCE_TOKENS, WEIGHT), np.zeros(count))
        return {
            TOKEN_IDS: np.zeros((count, 9), np.int32),
            LOG_PROBS: np.zeros((count, 10), np.float32),
            TARGET_LOG_PROB: np.zeros(count, np.float32),
        }


def rows_of(name: str, pack: bool, seq_len: int = 0) -> Any:
    """Return the samples, labeled texts or pairs that an objective is trained on.

    seq_len: Tokens of full rows of eight documents if packed, of one otherwise; 0: small rows of random length.
    """
    samples = (
        full_samples(seq_len, DOCUMENTS if pack else 1)
        if seq_len
        else data.Dataset([*unpacked(count=200)], PadOnlyTokenizer(), facts=Facts("here"), seq_len=SEQ_LEN)  # type: ignore[arg-type]
    )
    if name in ("next_token", "distillation", "stored_distillation", "dapo"):
        return data.PackedDataset(samples, seq_len or SEQ_LEN) if pack else samples
    pairs = [(first, first + 1) for first in range(0, len(samples), 2)]
    if name == "classification":
        return data.LabeledTexts(samples, torch.arange(len(samples)).numpy() % 3, LABELS[name])
    if name == "reward":
        return data.ScoredPairs(samples, samples, pairs)
    known = torch.zeros(len(pairs), 2, dtype=torch.float64)
    made = data.PairDataset(samples, samples, pairs).with_values(DESIRABLE, known)
    if name != "dpo_adapters_off":
        made = made.with_values(REFERENCE, known)
    return data.pack_pairs(made.to_be_packed(seq_len or SEQ_LEN)) if pack else made


def full_samples(seq_len: int, documents: int) -> data.Dataset:
    """Return equally long samples, `documents` to a row, whose tokens are all targets."""
    example = data.Example([1] * (seq_len // documents), [1] * (seq_len // documents))
    return data.Dataset([example] * (64 * documents), PadOnlyTokenizer(), facts=Facts("here"), seq_len=seq_len)  # type: ignore[arg-type]


def full_rows(seq_len: int, documents: int) -> data.PackedDataset:
    """Return packed rows of `full_samples`."""
    return data.PackedDataset(full_samples(seq_len, documents), seq_len)


def build(name: str, cfg: ModelConfig, model: training.Prepared, teacher: training.Prepared | None) -> Any:
    """Return an objective."""
    mesh: Mesh | None = model.settings.mesh
    vocabulary = cfg.config["vocab_size"]
    if teacher is not None:
        return training.Distillation(DistillationConfig(), _hidden_states_of(teacher, vocabulary))
    if name == "stored_distillation":
        stored = DistillConfig(model=cfg, data=DocsDataConfig(), teacher=TeacherConfig(stored="stored"))
        return StoredDistillation(stored, byte_tokenizer(), vocabulary)
    if name == "dapo":
        return TokenPolicy(DAPOConfig(beta=0.1), RolloutsConfig(batches=2, temperature=0.7))
    if name == "classification":
        return training.Classification()
    if name == "reward":
        return training.Reward(RewardConfig(center_weight=0.1), mesh)
    if name in PREFERENCES:
        recipe = DpoConfig(model=cfg, data=PreferencesDataConfig(path="pairs.jsonl"), objective=PREFERENCES[name])
        return training.build_preference(
            recipe, training.RunContext(mesh, model.settings.device, rank=1), model, vocabulary
        )
    return training.PLAIN
