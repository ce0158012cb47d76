"""Objectives of recipes/dpo.py with their reference model, which is the trained model before its first step."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save

from components import checkpoint, data, models
from components.batch import Batch
from components.config.model_files import ADAPTER_FILES, adapter_folder, locate
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.objective import (
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    Reference,
    SimPOConfig,
)
from components.config.schema.recipes import DpoConfig
from components.config.schema.run import PeftMethod
from components.distributed.fsdp import reshard
from components.json_collectives import all_gather_json, broadcast_json
from components.protocol.errors import ConfigError
from components.protocol.run_files import atomic_write
from components.storage.tensor_files import OpenFile, read_header
from components.torch_kernels import torch_dtype
from components.training.context import RunContext
from components.training.loss import sum_over_ranks
from components.training.objectives.base import check_dropout
from components.training.objectives.preference import (
    DPO,
    KTO,
    ORPO,
    REFERENCE,
    Preference,
    ReferenceScorer,
    SimPO,
)
from components.training.preparation import prepare_frozen
from components.training.prepared import Prepared
from components.training.step import local_batch, score_rows

logger = logging.getLogger(__name__)

_PAIRS, _WEIGHTS, _HASH = "pairs", "weights", "hash"
"""Keys in the metadata of a file: fingerprint of the pairs, identity of the weights, hash of both and of the values."""
_OTHER_WEIGHTS = (
    "was computed with other base weights, another adapter or another dtype than model.path, peft.path and model.* are "
    "now; restore those, remove the file to continue with the present ones as the reference, or choose another run.dir "
    "to start over"
)
_NOT_OF_WEIGHTS = {"path", "revision", "tokenizer", "chat_template", "attention", "loss", "compile", "fused",
                   "router_aux", "router_aux_coef", "trust_remote_code"}  # fmt: skip
"""Keys of `model` without an effect on the log-probabilities of a row, and where the weights are."""
_SAMPLES, _SAMPLE_BYTES = 1024, 4096
_ROUNDING = 1e-2


def build_preference(cfg: DpoConfig, run: RunContext, model: Prepared, vocabulary: int) -> Preference:
    """Return the objective of a config. A collective if objective.reference=frozen_copy, which loads a second model.

    Args:
        model: The model to be trained.
        vocabulary: Vocabulary size of the tokenizer, as for `prepare`.

    Raises ConfigError for a model with dropout, and TypeError for a config that is none of the kinds.
    """
    check_dropout(model.module, cfg.objective.kind)
    preference = _preference_of(cfg, run, vocabulary)
    preference.load_reference = lambda: prepare_frozen(cfg, run, vocabulary)
    if cfg.peft.path is not None:
        preference.keeps_adapters = True
        preference.load_reference = lambda: _with_first_adapter(model, cfg)
    if isinstance(cfg.objective, DPOConfig | KTOConfig):
        when = "once before training" if preference.needs_stored_reference else "in each step"
        adapter = "" if cfg.peft.path is None else f" with {cfg.peft.path}"
        reference = f"{cfg.model.origin}{adapter}: log-probabilities {when} ({cfg.objective.reference})"
        model.notes.insert(0, ("reference", reference))
    if preference.needs_stored_reference and run.rank == 0:
        with suppress(OSError):
            preference.reference_weights = _identity_of_weights(cfg)
    return preference


def _with_first_adapter(model: Prepared, cfg: DpoConfig) -> Prepared:
    """Set the adapters that training began with, until a checkpoint is loaded. A collective."""
    checkpoint.load_adapter(model.module, cfg.peft, torch_dtype(model.stored_dtype or cfg.model.stored_dtype()))
    return model


def _preference_of(cfg: DpoConfig, run: RunContext, vocabulary: int) -> Preference:
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


def _scorer(method: Reference, cfg: DpoConfig, run: RunContext, vocabulary: int) -> ReferenceScorer | None:
    """Return the function that scores each step's rows; None if the log-probabilities are computed before training."""
    match method:
        case Reference.precomputed:
            return None
        case Reference.adapters_off:
            return _score_without_adapters
        case Reference.frozen_copy:
            copy = prepare_frozen(cfg, run, vocabulary)
            return lambda trained, batches: _score_and_reshard(copy, batches)


def _score_without_adapters(trained: Prepared, batches: Sequence[Batch]) -> torch.Tensor:
    with models.adapters_off(trained.module):
        return score_rows(trained, batches).log_probs


def _score_and_reshard(model: Prepared, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the log-probabilities (rows,) of micro-batches under a model that is not trained. A collective."""
    log_probs = score_rows(model, batches).log_probs
    for part in model.called_modules:
        reshard(part)
    return log_probs


def with_reference(
    model: Prepared, pairs: data.PairedRows, preference: Preference, run: RunContext
) -> data.PairedRows | data.PackedPairs:
    """Return pairs with the log-probabilities of both answers under the reference, in packed rows under data.pack.

    A collective. The log-probabilities are left out if the objective does not need them stored: it has no reference, or
    scores it at every step.

    Call it before a checkpoint is loaded: the reference is the model at that time, or with new adapters the model
    without them. The log-probabilities (16 bytes per pair) are computed in one pass over the pairs when a run begins,
    and saved in the run directory, from which a resume on any mesh reads them. A resume without that file, such as one
    in another directory, or with a damaged one computes them again: with adapters with the model, otherwise with a
    second copy of the base weights. Adapters from peft.path are loaded again for this.

    Raises ConfigError if such a copy is needed and the objective cannot load it, if the file was computed with other
    base weights, or if the log-probabilities are not finite.
    """
    if not preference.needs_stored_reference:
        return data.pack_pairs(pairs)
    file = Path(run.dir) / f"reference-{pairs.fingerprint[:16]}.safetensors"
    weights = broadcast_json(preference.reference_weights)
    problem = ""
    if run.resume_from is not None:
        # A file in the directory of a run that begins is of an earlier attempt, which may have had other weights.
        saved, problem = _read(file, pairs, weights)
        problem = max(all_gather_json(problem))  # all ranks use the file, or all compute
        if problem == _OTHER_WEIGHTS:
            raise ConfigError(f"{file}: {problem}")
        if saved is not None and not problem:
            return data.pack_pairs(pairs.with_values(REFERENCE, saved))
    without_adapters = models.has_adapters(model.module) and not preference.keeps_adapters
    reference = model
    if run.resume_from is not None and not without_adapters:
        if preference.load_reference is None:
            raise ConfigError(
                f"{file}: {problem}, and this resumed run does not load the reference weights; restore the file, "
                "choose another run.dir to start over, or set the objective's load_reference"
            )
        reference = preference.load_reference()
    if problem and run.rank == 0:
        logger.warning(
            "%s: %s; the log-probabilities under the reference model are computed again, with the weights that "
            "model.path and peft.path are now",
            file,
            problem,
        )
    with models.adapters_off(model.module) if without_adapters else nullcontext():
        log_probs = _score_pairs(reference, pairs, run.plan)
    if (wrong := _count_wrong(log_probs)) > 0:
        raise ConfigError(
            f"model.path: the reference model returns no log-probabilities for {wrong:,} of {len(pairs):,} pairs (NaN, "
            "infinite or above 0); use other weights"
        )
    if run.rank == 0:
        metadata = {_PAIRS: pairs.fingerprint, _WEIGHTS: weights}
        hashed = _hash_of(metadata, log_probs.numpy().tobytes())
        atomic_write(file, save({REFERENCE: log_probs}, {**metadata, _HASH: hashed}))
    return data.pack_pairs(pairs.with_values(REFERENCE, log_probs))


def _score_pairs(model: Prepared, pairs: data.PairedRows, plan: data.BatchPlan) -> torch.Tensor:
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


def _identity_of_weights(cfg: DpoConfig) -> str:
    """Return a hash of what the log-probabilities of a config's base model depend on.

    Of weight files in a folder it covers a sample of the bytes: all up to 4 MiB, else 1,024 blocks of 4 KiB at equal
    distances. So the folder may be moved, and nothing is loaded. Of a hub model it covers name and revision.
    """
    model, default = asdict(cfg.model), asdict(ModelConfig(path="any"))
    parts: dict[str, Any] = {
        key: model[key] for key in model if key not in _NOT_OF_WEIGHTS and model[key] != default[key]
    }
    parts["nf4"] = cfg.peft.method is PeftMethod.qlora
    if cfg.model.init is WeightInit.random:
        parts["seed"] = cfg.run.seed
    elif cfg.model.path is not None:
        files = locate(cfg.model.path)
        folder = Path(files.name_or_folder)
        weights = [folder / files.gguf_file] if files.gguf_file else sorted(folder.glob("*.safetensors"))
        parts["weights"] = _sample_of(weights) if files.is_local else [files.name_or_folder, cfg.model.revision]
    if cfg.peft.path is not None:
        weight_file = adapter_folder(cfg.peft.path) / ADAPTER_FILES[1]
        parts["adapter"] = _sample_of([weight_file]) if weight_file.exists() else cfg.peft.path
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sample_of(files: Sequence[Path]) -> list[Any]:
    opened = [OpenFile(file) for file in files]
    distance = max(_SAMPLE_BYTES, sum(file.size for file in opened) // _SAMPLES)
    found = list[Any]()
    for file in opened:
        digest = xxhash.xxh3_128()
        for start in range(0, file.size, distance):
            digest.update(file.read(min(_SAMPLE_BYTES, file.size - start), start))
        found.append([file.size, digest.hexdigest()])
    return found


def _read(file: Path, pairs: data.PairedRows, weights: str) -> tuple[torch.Tensor | None, str]:
    """Return the log-probabilities (pairs, 2) that an earlier attempt saved, or None and why they cannot be used."""
    try:
        opened = OpenFile(file)
        header = read_header(opened)
        stored = dict(header.metadata)
        tensor, hashed = header.tensors[REFERENCE], stored.pop(_HASH)
        content = opened.read(tensor.end - tensor.begin, tensor.begin)
    except FileNotFoundError:
        return None, "missing"
    except (OSError, ValueError, LookupError) as error:
        return None, f"damaged ({type(error).__name__}: {error})"
    if hashed != _hash_of(stored, content):
        return None, "damaged, as its hash shows"
    if stored.get(_PAIRS) != pairs.fingerprint or (tensor.dtype, tensor.shape) != ("F64", (len(pairs), 2)):
        return None, f"not of the {len(pairs):,} pairs of this run"
    if weights and stored.get(_WEIGHTS) not in ("", weights):
        return None, _OTHER_WEIGHTS
    log_probs = torch.frombuffer(bytearray(content), dtype=torch.float64).view(-1, 2)
    return (None, "no log-probabilities") if _count_wrong(log_probs) else (log_probs, "")


def _hash_of(metadata: dict[str, str], content: bytes) -> str:
    digest = xxhash.xxh3_128(json.dumps(metadata, sort_keys=True).encode())
    digest.update(content)
    return digest.hexdigest()


def _count_wrong(log_probs: torch.Tensor) -> int:
    """Return the number of pairs without two log-probabilities; sums over tokens may be above 0 by rounding."""
    return int((~(log_probs.isfinite() & (log_probs <= _ROUNDING))).any(-1).sum())
