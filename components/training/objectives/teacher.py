"""Objective of recipes/distill.py with its teacher: a second model on the same mesh, or tokens that it stored before.

scripts/teacher.py stores a teacher's most likely tokens for each target token.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from components import data, models
from components.batch import Batch
from components.config.compute_rules import vocabulary_problem
from components.config.schema.model import ModelConfig
from components.config.schema.recipes import DistillConfig, EvaluateConfig, frozen_config, teacher_model
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
from components.data.token_store.shards import StoredColumn
from components.distributed.fsdp import reshard
from components.protocol.errors import ConfigError
from components.storage.tensor_files import VerifiedFile
from components.training.context import RunContext
from components.training.objectives.base import Vocabulary
from components.training.objectives.chunked_loss import Head
from components.training.objectives.distillation import Distillation, TeacherHead, TeacherHidden
from components.training.objectives.loss_head import local_head, vocabulary_of
from components.training.preparation import prepare_frozen
from components.training.prepared import Prepared
from components.training.step import last_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = data.Dataset | data.PackedDataset | data.TokenRows | data.MixtureDataset
_DTYPES: dict[str, type[np.generic]] = {"I32": np.int32, "F32": np.float32, "I64": np.int64}
_ROUNDING = 1e-3  # of float32 sums over a vocabulary


def build_distillation(
    cfg: DistillConfig, run: RunContext, model: Prepared, tokenizer: PreTrainedTokenizerBase | None
) -> Distillation:
    """Return the objective of a config. A collective unless teacher.stored is set: it loads the teacher.

    Args:
        model: The student.
        tokenizer: The student's tokenizer; None: a simulation, which reads neither tokenizers nor stored values.

    Raises ConfigError if the teacher has another tokenizer or a smaller vocabulary, or if the mesh cannot run it.
    """
    vocabulary = vocabulary_of(model.module)
    if cfg.teacher.path is None:
        model.notes.insert(0, ("teacher", f"its most likely tokens, stored in {cfg.teacher.stored}"))
        return StoredDistillation(cfg, tokenizer, vocabulary)
    teacher = load_teacher(cfg, run, tokenizer, vocabulary)
    model.notes.insert(0, ("teacher", f"{cfg.teacher.path}: {teacher.summary}"))
    return Distillation(cfg.objective, _hidden_states_of(teacher, vocabulary))


def load_teacher(
    cfg: DistillConfig, run: RunContext, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> Prepared:
    """Load the teacher on the mesh of the run. A collective.

    Args:
        tokenizer: The student's tokenizer; None: not compared with the teacher's, in a simulation.
        vocabulary: Vocabulary size of the student.

    Raises ConfigError if the teacher has another tokenizer or a smaller vocabulary, or if the mesh cannot run it.
    """
    teacher_cfg = teacher_model(cfg)
    try:
        if tokenizer is not None:
            _check_tokenizer(cfg, teacher_cfg, tokenizer)
        teacher = prepare_frozen(cfg, run, vocabulary if tokenizer is None else len(tokenizer), teacher_cfg)
    except ConfigError as error:
        raise ConfigError([_with_teacher_keys(problem) for problem in error.problems]) from error
    size = vocabulary_of(teacher.module)
    if size < vocabulary:
        raise ConfigError(vocabulary_problem(str(cfg.teacher.path), size, vocabulary))
    return teacher


def _hidden_states_of(teacher: Prepared, vocabulary: int) -> TeacherHidden:
    """Return the function that runs a teacher with a loss head on a step's micro-batches.

    Args:
        vocabulary: Vocabulary size of the student. Further entries of the teacher's vocabulary are left out: models of
            one family pad the vocabulary of their tokenizer to different sizes.
    """

    def hidden_states(batches: Sequence[Batch]) -> tuple[list[torch.Tensor | None], TeacherHead | None]:
        hidden = [last_hidden(teacher, batch) for batch in batches]
        loss_head = teacher.settings.loss_head
        for part in teacher.called_modules:  # only the head is used further
            reshard(part, kept=None if loss_head is None else loss_head.head)
        return [None if each is None else each.to(teacher.compute_dtype) for each in hidden], head_of(
            teacher, vocabulary
        )

    return hidden_states


def head_of(teacher: Prepared, vocabulary: int) -> TeacherHead | None:
    """Return this rank's shard of the teacher's head, which a forward left unsharded; None on ranks without it.

    A collective over tp if the teacher's vocabulary is larger than the student's, because their shards differ.
    """
    loss_head = teacher.settings.loss_head
    if loss_head is None or loss_head.head is None:
        return None
    head: Any = loss_head.head
    weight, bias, spec, mesh = local_head(head, loss_head.spec)
    cut = len(head.weight) > vocabulary

    def own(local: torch.Tensor | None, tensor: Any) -> torch.Tensor | None:
        if local is None:
            return None
        local = _first_entries(tensor, vocabulary, mesh, spec) if cut else local
        return local.detach().to(teacher.compute_dtype)

    shards = spec.vocabulary
    if shards.group is not None and mesh is not None:
        largest = -(-vocabulary // mesh.size())
        shards = Vocabulary(shards.group, mesh.get_local_rank() * largest, largest, vocabulary)
    return TeacherHead(own(weight, head.weight), own(bias, head.bias), spec.logits_transform, shards)  # type: ignore[arg-type]


def _first_entries(tensor: Any, vocabulary: int, mesh: DeviceMesh | None, spec: Head) -> torch.Tensor:
    """Return this rank's shard of the first `vocabulary` rows of a head's tensor, sharded like the student's head."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    rows = full[:vocabulary]
    if mesh is None or spec.vocabulary.group is None:
        return rows
    largest = -(-vocabulary // mesh.size())
    first = mesh.get_local_rank() * largest
    return rows[first : first + largest]


def teacher_run_config(cfg: DistillConfig) -> EvaluateConfig:
    """Return the config of a run of the teacher alone, on the mesh and with the batch sizes of a distillation."""
    return frozen_config(cfg, teacher_model(cfg))


def _check_tokenizer(cfg: DistillConfig, teacher: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the teacher's tokenizer has the same tokens with the same ids."""
    other = models.load_tokenizer(teacher)
    own, others = tokenizer.get_vocab(), other.get_vocab()
    if own == others:
        return
    same = sum(others.get(token) == index for token, index in own.items())
    raise ConfigError(
        f"teacher.path={cfg.teacher.path}: its tokenizer ({type(other).__name__}, {len(others):,} tokens) differs from "
        f"the student's ({len(own):,} tokens, of which {same:,} have the same id in both); distillation compares the "
        "probabilities of the same tokens, so use a teacher with the student's tokenizer"
    )


def _with_teacher_keys(problem: str) -> str:
    """Return a problem of the teacher's config with its keys (model.path) rewritten to those of the run."""
    problem = problem.replace("evaluation.seq_len", "training.seq_len")  # a frozen model has no training section
    return re.sub(r"\bmodel\.(?=(path|revision|tokenizer|dtype|trust_remote_code)\b)", "teacher.", problem)


class StoredTeacher:
    """A teacher's most likely tokens for the target tokens of a dataset, read from a file row by row."""

    def __init__(self, file: Path) -> None:
        """Open a file. Raises OSError or ValueError if it cannot be read."""
        self.header, content, tensors, hashes = read_teacher_file(file)

        def column(name: str) -> StoredColumn:
            dtype, shape, begin, end = tensors[name]
            part = VerifiedFile(content, begin, end, hashes[name])
            return StoredColumn(part, begin, math.prod(shape), _DTYPES[dtype])

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
        super().__init__(cfg.objective)
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
        return stored


def hash_of_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's tokens and their ids."""
    return xxhash.xxh3_128(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
