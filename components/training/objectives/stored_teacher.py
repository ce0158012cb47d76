"""Distillation from a teacher's most likely tokens, which scripts/teacher.py stored for each target token."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from components import data
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema.recipes import DistillConfig
from components.config.teacher_files import (
    LOG_PROBS,
    REMEDY,
    STARTS,
    TARGET_LOG_PROB,
    TOKEN_IDS,
    mismatches,
    read_teacher_file,
    teacher_file,
)
from components.data.tokens import StoredColumn
from components.exchange import this_rank
from components.storage.stored_file import VerifiedFile
from components.training.objectives.distillation import Distillation, TeacherHead

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Rows = data.Dataset | data.PackedDataset | data.TokenRows | data.MixtureDataset
_DTYPES: dict[str, type[np.generic]] = {"I32": np.int32, "F32": np.float32, "I64": np.int64}
_ROUNDING = 1e-3  # of float32 sums over a vocabulary


class StoredTeacher:
    """A teacher's most likely tokens for the target tokens of a dataset, read from a file row by row."""

    def __init__(self, file: Path) -> None:
        """Open a file. Raises OSError or ValueError if it cannot be read."""
        self.header, content, tensors, hashes = read_teacher_file(file)
        self.is_hashed = bool(hashes)
        """Whether damage is detected as it is read."""

        def column(name: str) -> StoredColumn:
            dtype, shape, begin, end = tensors[name]
            part = VerifiedFile(content, begin, end, hashes[name]) if hashes else content
            return StoredColumn(part, _DTYPES[dtype], begin, math.prod(shape))

        self._content, self._columns = content, {name: column(name) for name in tensors}
        self._starts = self._columns.pop(STARTS)[:]
        if (
            self._starts[0] != 0
            or self._starts[-1] != len(self._columns[TARGET_LOG_PROB])
            or (np.diff(self._starts) < 0).any()
        ):
            raise ValueError("the targets of its rows are not consecutive")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._starts) - 1

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        """Return the values of a row's targets by name, for `Batch.token_values`. Raises ConfigError if damaged."""
        start, stop = int(self._starts[index]), int(self._starts[index + 1])
        k, columns = self.header.top_k, self._columns
        values = {
            TOKEN_IDS: columns[TOKEN_IDS][start * k : stop * k].reshape(-1, k),
            LOG_PROBS: columns[LOG_PROBS][start * (k + 1) : stop * (k + 1)].reshape(-1, k + 1),
            TARGET_LOG_PROB: columns[TARGET_LOG_PROB][start:stop],
        }
        if problem := value_problem(values, self.header.vocabulary):
            raise self._content.damaged(f"row {index:,} has {problem}")
        return values


def value_problem(values: Mapping[str, np.ndarray], vocabulary: int) -> str:
    """Return what is wrong with the values of some targets by tensor name; "": nothing."""
    ids, log_probs, of_targets = values[TOKEN_IDS], values[LOG_PROBS], values[TARGET_LOG_PROB]
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        return f"token ids from {ids.min():,} to {ids.max():,}, in a vocabulary of {vocabulary:,}"
    if not (of_targets <= _ROUNDING).all():
        return "log-probabilities of targets that are no numbers or above 0"
    with np.errstate(over="ignore"):
        sums = np.exp(log_probs).sum(-1)
    if not (np.abs(sums - 1) <= _ROUNDING).all():
        return "log-probabilities that are no numbers or not those of probabilities with the sum 1"
    return ""


class StoredDistillation(Distillation):
    """Distillation from the most likely tokens in `teacher.stored`, which the micro-batches hold.

    Args:
        tokenizer: The student's tokenizer; None: `stored_values` is not called.
        vocabulary: Vocabulary size of the student.
    """

    def __init__(self, cfg: DistillConfig, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
        super().__init__(cfg.objective, _no_hidden_states)
        self._folder, self._temperature = str(cfg.teacher.stored), cfg.objective.temperature
        self._tokenizer_hash, self._vocabulary = (
            None if tokenizer is None else hash_of_vocabulary(tokenizer),
            vocabulary,
        )

    def stored_values(self, dataset: Rows, split: str) -> StoredTeacher:
        """Return the values of the rows of a split, for `data.TrainBatches` and `data.EvalBatches`.

        Raises ConfigError if they were stored for other rows, another tokenizer or vocabulary, or at another
        temperature.
        """
        folder, file = self._folder, teacher_file(self._folder, split)
        try:
            stored = StoredTeacher(file)
        except ConfigError:
            raise
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"teacher.stored={folder}: {file.name} cannot be read ({error}); {REMEDY}") from error
        problems = mismatches(folder, stored.header, self._temperature, self._vocabulary)
        if stored.header.tokenizer != self._tokenizer_hash:
            problems.append(
                f"teacher.stored={folder}: was written for another tokenizer than the student's, with other tokens or "
                "ids; run scripts/teacher.py again with this student"
            )
        elif stored.header.samples != dataset.fingerprint or stored.rows != len(dataset):
            problems.append(
                f"teacher.stored={folder}: {file.name} was written for other rows than the {len(dataset):,} of this "
                f"run's {split} split; use the same data.* and training.seq_len, or run scripts/teacher.py with these"
            )
        if problems:
            raise ConfigError(problems)
        if not stored.is_hashed and this_rank() == 0:
            logger.warning(
                "teacher.stored=%s: %s was written by an earlier version without hashes; only the range and the sums "
                "of its values are checked",
                folder,
                file.name,
            )
        return stored


def _no_hidden_states(batches: Sequence[Batch]) -> tuple[list[torch.Tensor | None], TeacherHead | None]:
    return [None] * len(batches), None


def hash_of_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's tokens and their ids."""
    return xxhash.xxh3_128(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
