"""Objectives of recipes/dpo.py with their reference model, which is the trained model before its first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from components import data, models
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema.objective import (
    DPOConfig,
    KTOConfig,
    ObjectiveKind,
    ORPOConfig,
    Reference,
    SimPOConfig,
)
from components.config.schema.recipes import DpoConfig
from components.distributed.fsdp import reshard
from components.distributed.mesh import Mesh
from components.exchange import all_gather_json
from components.protocol.run_files import atomic_write
from components.training.forward import local_batch, score_rows
from components.training.loss import sum_over_ranks
from components.training.objectives.preference import (
    DPO,
    KTO,
    ORPO,
    REFERENCE,
    Preference,
    ReferenceScorer,
    SimPO,
)
from components.training.setup.prepare import prepare_frozen
from components.training.setup.prepared import Prepared

logger = logging.getLogger(__name__)


class ReferenceRun(Protocol):
    """Attributes of a run that the functions below use."""

    dir: str
    """The run directory."""
    resume_from: Path | None
    """Checkpoint whose weights are loaded afterwards; None for a new run."""
    rank: int
    """Global rank."""
    device: torch.device
    """This rank's device."""
    mesh: Mesh
    """The device mesh."""

    @property
    def plan(self) -> data.BatchPlan:
        """Assignment of rows to dp ranks."""


def build_preference(cfg: DpoConfig, run: ReferenceRun, model: Prepared, vocabulary: int) -> Preference:
    """Return the objective of a config. A collective if objective.reference=frozen_copy, which loads a second model.

    Args:
        model: The model to be trained.
        vocabulary: Vocabulary size of the tokenizer, as for `prepare`.

    Raises ConfigError for a model with dropout, and TypeError for a config that is none of the kinds.
    """
    _check_dropout(model.module, cfg.objective.kind)
    preference = _preference_of(cfg, run, vocabulary)
    preference.load_reference = lambda: prepare_frozen(cfg, run, vocabulary)
    return preference


def _preference_of(cfg: DpoConfig, run: ReferenceRun, vocabulary: int) -> Preference:
    match cfg.objective:
        case SimPOConfig() as objective:
            return SimPO(objective)
        case ORPOConfig() as objective:
            return ORPO(objective)
        case DPOConfig() as objective:
            return DPO(objective, _scorer(objective.reference, cfg, run, vocabulary))
        case KTOConfig() as objective:
            return KTO(objective, _scorer(objective.reference, cfg, run, vocabulary))
    raise TypeError(f"build_preference: there is no objective for {type(cfg.objective).__name__}")


def _scorer(method: Reference, cfg: DpoConfig, run: ReferenceRun, vocabulary: int) -> ReferenceScorer | None:
    """Return the function that scores each step's rows; None if the log-probabilities are computed before training."""
    match method:
        case Reference.precomputed:
            return None
        case Reference.adapters_off:
            return _score_without_adapters
        case Reference.frozen_copy:
            copy = prepare_frozen(cfg, run, vocabulary)
            return lambda trained, batches: score_and_reshard(copy, batches)


def _score_without_adapters(trained: Prepared, batches: Sequence[Batch]) -> torch.Tensor:
    with models.adapters_off(trained.module):
        return score_rows(trained, batches).log_probs


def score_and_reshard(model: Prepared, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the log-probabilities (rows,) of micro-batches under a model that is not trained. A collective."""
    log_probs = score_rows(model, batches).log_probs
    for part in model.called_modules:
        reshard(part)
    return log_probs


def with_reference(
    model: Prepared, pairs: data.PairedRows, preference: Preference, run: ReferenceRun
) -> data.PairedRows | data.PackedPairs:
    """Return pairs with the log-probabilities of both answers under the reference, in packed rows under data.pack.

    A collective. The log-probabilities are left out if the objective does not need them stored: it has no reference, or
    scores it at every step.

    Call it before a checkpoint is loaded: the reference is the model at that time, or with adapters the model without
    them. The log-probabilities (16 bytes per pair) are computed in one pass over the pairs when a run begins, and saved
    in the run directory, from which a resume on any mesh reads them. A resume without that file, such as one in another
    directory, computes them again: with adapters with the model, otherwise with a second copy of the base weights.

    Raises ConfigError if such a copy is needed and the objective cannot load it.
    """
    if not preference.needs_stored_reference:
        return data.pack_pairs(pairs)
    file = Path(run.dir) / f"reference-{pairs.fingerprint[:16]}.safetensors"
    # A file in the directory of a run that begins is of an earlier attempt, which may have had other weights.
    saved = None if run.resume_from is None else _read(file)
    if all(all_gather_json(saved is not None)) and saved is not None:  # all ranks read the file, or all compute
        return data.pack_pairs(pairs.with_values(REFERENCE, saved))
    has_adapters = bool(models.adapted_layers(model.module))
    reference = model
    if run.resume_from is not None and not has_adapters:
        if preference.load_reference is None:
            raise ConfigError(
                f"{file}: the log-probabilities under the reference model are missing or unreadable, and this resumed "
                "run does not load the reference weights; restore the file, choose another run.dir to start over, or "
                "set the objective's load_reference"
            )
        if run.rank == 0:
            logger.warning(
                "%s: missing or unreadable; the log-probabilities under the reference model are computed again", file
            )
        reference = preference.load_reference()
    with models.adapters_off(model.module) if has_adapters else nullcontext():
        log_probs = score_pairs(reference, pairs, run.plan)
    if run.rank == 0:
        atomic_write(file, save({REFERENCE: log_probs}))
    return data.pack_pairs(pairs.with_values(REFERENCE, log_probs))


def score_pairs(model: Prepared, pairs: data.PairedRows, plan: data.BatchPlan) -> torch.Tensor:
    """Return the log-probabilities of the chosen and the rejected answers, (pairs, 2) float64 on the host.

    A collective. Each dp rank scores a part of the pairs; the result is the same on every rank.
    """
    settings, size = model.settings, plan.micro_batch_size
    was_training = model.module.training
    model.module.eval()
    log_probs = torch.zeros(len(pairs) + size * plan.dp_size, 2, dtype=torch.float64, device=settings.device)
    for number, batch in enumerate(data.EvalBatches(pairs, plan)):
        scores = score_rows(model, [local_batch(batch.to(settings.device), settings)])
        start = (number * plan.dp_size + plan.dp_rank) * size
        log_probs[start : start + size] = scores.log_probs.view(-1, 2) * settings.counts_rows
    model.module.train(was_training)
    for part in model.called_modules:
        reshard(part)  # an optimizer that is built afterwards would hold the unsharded parameters
    return sum_over_ranks(log_probs)[: len(pairs)].cpu()


def _check_dropout(model: Any, kind: ObjectiveKind) -> None:
    """Raise ConfigError for a model with dropout, whose two passes would use different dropout masks."""
    config = model.config.get_text_config().to_dict()
    rates = {key: value for key, value in config.items() if "drop" in key and isinstance(value, float) and value > 0}
    if rates:
        raise ConfigError(
            f"model.path: the model's config has {', '.join(f'{key}={value}' for key, value in rates.items())}, but "
            f"objective.kind={kind} needs a model without dropout, as its two passes would use different dropout "
            "masks; set these values to 0 in its config.json, or use another model"
        )


def _read(file: Path) -> torch.Tensor | None:
    """Return the log-probabilities (pairs, 2) that an earlier attempt saved, or None if there is no readable file."""
    try:
        return load_file(file)[REFERENCE]
    except (OSError, SafetensorError, KeyError):
        return None
