"""Log-probabilities of pairs under the reference model, which is the trained model before its first step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from components import data, models
from components.config.errors import ConfigError
from components.distributed.fsdp import fsdp_units
from components.exchange import all_gather_json
from components.protocol.run_files import atomic_write
from components.training.forward import local_batch, score_rows
from components.training.objectives.preference import REFERENCE
from components.training.setup.prepared import Prepared
from components.training.step import sum_over_ranks


class ReferenceRun(Protocol):
    """Attributes of a run that `with_reference` uses."""

    dir: str
    """The run directory."""
    resume_from: Path | None
    """Checkpoint whose weights are loaded afterwards; None for a new run."""
    rank: int
    """Global rank."""

    @property
    def plan(self) -> data.BatchPlan:
        """Assignment of rows to dp ranks."""


def with_reference(model: Prepared, pairs: data.PairDataset, run: ReferenceRun) -> data.PairDataset:
    """Return pairs with the log-probabilities of both answers under the reference model. A collective.

    Call it before a checkpoint is loaded: the reference is the model at that time, or with adapters the model without
    them. The log-probabilities (16 bytes per pair) are computed once, in one pass over the pairs, and saved in the run
    directory, from which a resume on any mesh reads them.

    Raises ConfigError for a model with dropout, and if a resumed run without adapters has no file of log-probabilities,
    because the reference weights are not loaded then.
    """
    _check_dropout(model.module)
    file = Path(run.dir) / f"reference-{pairs.fingerprint[:16]}.safetensors"
    saved = _read(file)
    if all(all_gather_json(saved is not None)) and saved is not None:  # all ranks read the file, or all compute
        return pairs.with_values(REFERENCE, saved)
    has_adapters = bool(models.adapted_layers(model.module))
    if run.resume_from is not None and not has_adapters:
        raise ConfigError(
            f"{file}: the log-probabilities under the reference model are missing or unreadable, and a resumed run "
            "cannot compute them, because it does not load the reference weights; restore the file, or start a new "
            "run (run.resume=never)"
        )
    with models.adapters_off(model.module) if has_adapters else nullcontext():
        log_probs = score_pairs(model, pairs, run.plan)
    if run.rank == 0:
        atomic_write(file, save({REFERENCE: log_probs}))
    return pairs.with_values(REFERENCE, log_probs)


def score_pairs(model: Prepared, pairs: data.PairDataset, plan: data.BatchPlan) -> torch.Tensor:
    """Return the log-probabilities of the chosen and the rejected answers, (pairs, 2) float64 on the host.

    A collective. Each dp rank scores a part of the pairs; the result is the same on every rank.
    """
    settings, size = model.settings, plan.micro_batch_size
    was_training = model.module.training
    model.module.eval()
    log_probs = torch.zeros(len(pairs) + size * plan.dp_size, 2, dtype=torch.float64, device=settings.device)
    for number, batch in enumerate(data.EvalBatches(replace(pairs, values={}), plan)):
        scores = score_rows(model, [local_batch(batch.to(settings.device), settings)])
        start = (number * plan.dp_size + plan.dp_rank) * size
        log_probs[start : start + size] = scores.log_probs.view(-1, 2) * settings.counts_rows
    model.module.train(was_training)
    # A forward leaves FSDP's root unsharded, and an optimizer built afterwards would hold the unsharded parameters.
    for root in [model.module] if model.pipeline is None else model.pipeline.stage_modules:
        for unit in fsdp_units(root):
            unit.reshard()
    return sum_over_ranks(log_probs)[: len(pairs)].cpu()


def _check_dropout(model: Any) -> None:
    """Raise ConfigError for a model with dropout, whose two passes would use different dropout masks."""
    config = model.config.get_text_config().to_dict()
    rates = {key: value for key, value in config.items() if "drop" in key and isinstance(value, float) and value > 0}
    if rates:
        raise ConfigError(
            f"model.path: the model's config has {', '.join(f'{key}={value}' for key, value in rates.items())}, but "
            "objective.kind=dpo needs a model without dropout, as its two passes would use different dropout masks; "
            "set these values to 0 in its config.json, or use another model"
        )


def _read(file: Path) -> torch.Tensor | None:
    """Return the log-probabilities (pairs, 2) that an earlier attempt saved, or None if there is no readable file."""
    try:
        return load_file(file)[REFERENCE]
    except (OSError, SafetensorError, KeyError):
        return None
