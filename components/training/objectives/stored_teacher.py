"""Distillation from a teacher's most likely tokens, which scripts/teacher.py stored for each target token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from components import data
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema.recipes import DistillConfig
from components.config.teacher_files import mismatches, read_teacher_file, teacher_file
from components.data.tokens import OpenFile, StoredColumn
from components.training.objectives.distillation import Distillation, TeacherHead
from components.training.objectives.top_k import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = data.Dataset | data.PackedDataset | data.TokenRows | data.MixtureDataset
DTYPES = {TOKEN_IDS: ("I32", np.int32), LOG_PROBS: ("F32", np.float32), TARGET_LOG_PROB: ("F32", np.float32)}
"""Dtype of each tensor of a file, in a safetensors header and in numpy. float32: bfloat16 would round log-probabilities
by up to 0.4 %, which is more than the difference between good students."""
STARTS = "starts"
"""Tensor with the number of targets before each row, (rows + 1,) int64."""
REMEDY = "remove it, and run scripts/teacher.py again"


class StoredTeacher:
    """A teacher's most likely tokens for the target tokens of a dataset, read from a file row by row."""

    def __init__(self, file: Path) -> None:
        """Open a file. Raises OSError or ValueError if it cannot be read."""
        self.header, offsets = read_teacher_file(file)
        content = OpenFile(file, "stored teacher", REMEDY)

        def column(name: str, dtype: Any) -> StoredColumn:
            begin, end = offsets[name]
            return StoredColumn(content, dtype, begin, (end - begin) // np.dtype(dtype).itemsize)

        self._starts = column(STARTS, np.int64)[:]
        self._columns = {name: column(name, dtype) for name, (_, dtype) in DTYPES.items()}

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        """Return the values of a row's targets by name, for `Batch.token_values`."""
        start, stop = int(self._starts[index]), int(self._starts[index + 1])
        k, columns = self.header.top_k, self._columns
        return {
            TOKEN_IDS: columns[TOKEN_IDS][start * k : stop * k].reshape(-1, k),
            LOG_PROBS: columns[LOG_PROBS][start * (k + 1) : stop * (k + 1)].reshape(-1, k + 1),
            TARGET_LOG_PROB: columns[TARGET_LOG_PROB][start:stop],
        }


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
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"teacher.stored={folder}: {file.name} cannot be read ({error}); {REMEDY}") from error
        problems = mismatches(folder, stored.header, self._temperature, self._vocabulary)
        if stored.header.tokenizer != self._tokenizer_hash:
            problems.append(
                f"teacher.stored={folder}: was written for another tokenizer than the student's, with other tokens or "
                "ids; run scripts/teacher.py again with this student"
            )
        elif stored.header.samples != dataset.fingerprint:
            problems.append(
                f"teacher.stored={folder}: {file.name} was written for other rows than the {len(dataset):,} of this "
                f"run's {split} split; use the same data.* and training.seq_len, or run scripts/teacher.py with these"
            )
        if problems:
            raise ConfigError(problems)
        return stored


def _no_hidden_states(batches: Sequence[Batch]) -> tuple[list[torch.Tensor | None], TeacherHead | None]:
    return [None] * len(batches), None


def hash_of_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's tokens and their ids."""
    return xxhash.xxh3_128(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
