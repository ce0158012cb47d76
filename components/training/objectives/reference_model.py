"""Log-probabilities of pairs under the reference model: the trained model as it is before its first step."""

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
from components.training.forward import local_part, score_rows
from components.training.objectives.preference import REFERENCE
from components.training.setup.prepared import Prepared
from components.training.step import sum_over_ranks


class KeepsReference(Protocol):
    """What `with_reference` takes of a run."""

    dir: str
    """The run directory."""
    resume_from: Path | None
    """The checkpoint whose weights are loaded afterwards."""
    rank: int
    """Of all ranks."""

    @property
    def plan(self) -> data.BatchPlan:
        """Which rows of each batch are this rank's."""


def with_reference(model: Prepared, pairs: data.PairDataset, run: KeepsReference) -> data.PairDataset:
    """Return pairs with the log-probabilities of both answers under the reference model. A collective.

    Call it before the checkpoint of an earlier attempt is loaded. The reference is the model as it is then, or, with
    adapters, the model without them. Its log-probabilities (16 bytes a pair) are computed once, in as many forwards as
    a pass over the pairs takes, and kept in the run directory: a resume reads them, on whatever mesh.

    Raises ConfigError where a resumed run has lost them and the model that they are of is not loaded, and for a model
    with dropout.
    """
    _refuse_dropout(model.module)
    file = Path(run.dir) / f"reference-{pairs.fingerprint[:16]}.safetensors"
    known = _read(file)
    if all(all_gather_json(known is not None)) and known is not None:  # all ranks read the file, or all compute
        return pairs.with_values(REFERENCE, known)
    has_adapters = bool(models.adapted_layers(model.module))
    if run.resume_from is not None and not has_adapters:
        raise ConfigError(
            f"{file}: the log-probabilities under the reference model are missing, and a resume does not load that "
            "model; put the file back, or begin a new run (run.resume=never)"
        )
    with models.adapters_off(model.module) if has_adapters else nullcontext():
        scored = score_pairs(model, pairs, run.plan)
    if run.rank == 0:
        atomic_write(file, save({REFERENCE: scored}))
    return pairs.with_values(REFERENCE, scored)


def score_pairs(model: Prepared, pairs: data.PairDataset, plan: data.BatchPlan) -> torch.Tensor:
    """Return the log-probabilities of the chosen and the rejected answers, (pairs, 2) float64 on the host.

    A collective. Equal on every rank; each dp rank computes a part.
    """
    settings, size = model.settings, plan.micro_batch_size
    was_training = model.module.training
    model.module.eval()
    scored = torch.zeros(len(pairs) + size * plan.dp_size, 2, dtype=torch.float64, device=settings.device)
    for number, batch in enumerate(data.EvalBatches(replace(pairs, values={}), plan)):
        scores = score_rows(model, [local_part(batch.to(settings.device), settings)])
        start = (number * plan.dp_size + plan.dp_rank) * size
        scored[start : start + size] = scores.log_probs.view(-1, 2) * settings.counts_rows
    model.module.train(was_training)
    # A forward leaves FSDP's root gathered, and an optimizer that is built then would get the gathered parameters.
    for root in [model.module] if model.pipeline is None else model.pipeline.stage_modules:
        for unit in fsdp_units(root):
            unit.reshard()
    return sum_over_ranks(scored)[: len(pairs)].cpu()


def _refuse_dropout(model: Any) -> None:
    """Raise ConfigError for a model that drops values in training: its two passes would drop different ones."""
    config = model.config.get_text_config().to_dict()
    used = {key: value for key, value in config.items() if "drop" in key and isinstance(value, float) and value > 0}
    if used:
        raise ConfigError(
            f"model.path: the model's config has {', '.join(f'{key}={value}' for key, value in used.items())}, and "
            "objective.kind=dpo takes two passes, which would drop different values; choose a model without dropout, "
            "or set these to 0 in its config.json"
        )


def _read(file: Path) -> torch.Tensor | None:
    """Return what an earlier attempt computed; None: nothing that can be read."""
    try:
        return load_file(file)[REFERENCE]
    except (OSError, SafetensorError, KeyError):
        return None
