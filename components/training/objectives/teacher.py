"""Objective of recipes/distill.py with its teacher, a second model on the same mesh unless it is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from components import models
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.rules.compute_rules import vocabulary_problem
from components.config.schema.model import ModelConfig
from components.config.schema.recipes import DistillConfig, EvaluateConfig, teacher_model
from components.distributed.fsdp import reshard
from components.training.forward import last_hidden
from components.training.objectives.chunked_loss import Head
from components.training.objectives.contract import Vocabulary
from components.training.objectives.distillation import Distillation, TeacherHead, TeacherHidden
from components.training.objectives.loss_head import local_head, vocabulary_of
from components.training.objectives.stored_teacher import StoredDistillation
from components.training.setup.prepare import MeshRun, frozen_config, prepare_frozen
from components.training.setup.prepared import Prepared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_distillation(
    cfg: DistillConfig, run: MeshRun, model: Prepared, tokenizer: PreTrainedTokenizerBase | None
) -> Distillation:
    """Return the objective of a config. A collective unless teacher.stored is set: it loads the teacher.

    Args:
        model: The student.
        tokenizer: The student's tokenizer; None: a dry run, which reads neither tokenizers nor stored values.

    Raises ConfigError if the teacher has another tokenizer or a smaller vocabulary, or if the mesh cannot run it.
    """
    vocabulary = vocabulary_of(model.module)
    if cfg.teacher.path is None:
        model.notes.insert(0, ("teacher", f"its most likely tokens, stored in {cfg.teacher.stored}"))
        return StoredDistillation(cfg, tokenizer, vocabulary)
    teacher = load_teacher(cfg, run, tokenizer, vocabulary)
    model.notes.insert(0, ("teacher", f"{cfg.teacher.path}: {teacher.summary}"))
    return Distillation(cfg.objective, hidden_states_of(teacher, vocabulary))


def load_teacher(
    cfg: DistillConfig, run: MeshRun, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> Prepared:
    """Load the teacher on the mesh of the run. A collective.

    Args:
        tokenizer: The student's tokenizer; None: not compared with the teacher's, in a dry run.
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


def hidden_states_of(teacher: Prepared, vocabulary: int) -> TeacherHidden:
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
