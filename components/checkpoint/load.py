"""Find a checkpoint that is whole, and put its state back."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from components.checkpoint.base_fingerprint import check_frozen, frozen_fingerprint
from components.checkpoint.checkpoint_error import agreed
from components.checkpoint.folders import FOLDER, FROZEN, STATE, candidates, random_file
from components.checkpoint.manifest import Manifest, ManifestError
from components.checkpoint.random_state import set_random_state
from components.checkpoint.save import mesh_of
from components.checkpoint.tensors import (
    MODEL,
    Optimizers,
    Tensors,
    make_optimizer_state,
    model_tensors,
    over_all_ranks,
    read_shapes,
    read_tensors,
)
from components.config.errors import ConfigError
from components.config.safe_yaml import load_yaml
from components.exchange import all_gather_json, broadcast_json
from components.resilience.faults import fault_point

logger = logging.getLogger(__name__)

AUTO, NEVER = "auto", "never"
SHOWN = 8
"""Names told in an error."""


def find_checkpoint(run_dir: Path | str, resume: str) -> Path | None:
    """Return the checkpoint to resume from, the same on every rank, with every bit of it verified; or None.

    Rank 0 chooses, by manifests alone; the ranks share the reading. Call it on all ranks.

    Args:
        resume: auto: the newest whole one of `run_dir`; one that is damaged is refused by the name of its file, with a
            warning, and the one before it is taken. never: None. Else the path of a checkpoint to begin from: what
            `run_dir` has saved since it did so goes before it, so that a job that is requeued does not begin again.

    Raises:
        ConfigError: `resume` is a path and there is no whole checkpoint.
    """
    if resume == NEVER:
        return None
    for path in map(Path, broadcast_json([str(each) for each in _newest_first(Path(run_dir) / FOLDER, resume)])):
        problems = verify(path)
        if not problems:
            return path
        _warn(path, problems)
    if resume == AUTO:
        return None
    path = Path(resume).expanduser()
    if problems := verify(path):
        raise ConfigError(f"run.resume={resume}: not a whole checkpoint: {'; '.join(problems)}")
    return path


def verify(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint, file by file; the same on every rank, which share the reading."""
    problems: list[str] = []
    body: dict[str, Any] = {}
    if _rank() == 0:
        try:
            manifest = Manifest.read(path)
            body, problems = manifest.body(), manifest.check_sizes(path)
        except ManifestError as error:
            problems = [str(error)]
    body, problems = broadcast_json([body, problems])
    if problems:
        return problems
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = Manifest.from_body(body).check_hashes(path, _rank(), world)
    return [problem for part in all_gather_json(mine) for problem in part]


def load_checkpoint(path: Path | str, model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """Put back the state that `save_checkpoint` wrote, and return its `extra`.

    Any mesh can load what any mesh wrote, with pipeline stages or without. Parameters, optimizer state and counters
    come back bit for bit; the random states too, where the mesh is the one that wrote them (else the ranks keep their
    own, and it is said). Hyper-parameters are not state: they are those of the optimizer given. Call it on all ranks
    with a path from `find_checkpoint`, which verifies the contents; here only sizes are compared.

    Raises:
        ConfigError: The checkpoint is not of this model: tensors missing, too many, of another shape or type, or
            adapters of other weights than the model has.
        CheckpointError: On every rank, when one of them could not read.
    """
    path = Path(path)
    with agreed(f"checkpoint {path} could not be read"):
        fault_point("at_load")
        manifest = Manifest.read(path)
        if problems := manifest.check_sizes(path):
            raise ManifestError("; ".join(problems))
        saved = json.loads((path / STATE).read_text())
        stored = read_shapes(path)
    parameters = model_tensors(model)
    _check_model(path, parameters, stored)
    check_frozen(path, saved.get(FROZEN), frozen_fingerprint(model))
    tensors = parameters | make_optimizer_state(optimizer, parameters, stored)
    with agreed(f"checkpoint {path} could not be read"):
        read_tensors(path, tensors)
        mesh = mesh_of(parameters)
        if manifest.mesh == mesh:
            set_random_state(json.loads((path / random_file(_rank())).read_text()))
        elif _rank() == 0:
            logger.info("random states are not resumed: %s wrote them, this is %s", manifest.mesh, mesh)
    return saved["extra"]


def load_model_weights(path: Path | str, model: nn.Module) -> None:
    """Set parameters and buffers to those of a checkpoint, every bit verified; for evaluation. Call it on all ranks.

    A model with adapters has its own weights already: the checkpoint holds the adapters.

    Raises:
        ConfigError: Not a whole checkpoint, or one of another model, or of adapters of another one.
        CheckpointError: On every rank, when one of them could not read.
    """
    path = Path(path).expanduser()
    if problems := verify(path):
        raise ConfigError(f"{path}: not a whole checkpoint: {'; '.join(problems)}")
    parameters = model_tensors(model)
    with agreed(f"checkpoint {path} could not be read"):
        stored = read_shapes(path)
        frozen = json.loads((path / STATE).read_text()).get(FROZEN)
    _check_model(path, parameters, stored)
    check_frozen(path, frozen, frozen_fingerprint(model))
    with agreed(f"checkpoint {path} could not be read"):
        read_tensors(path, parameters)


def _newest_first(folder: Path, resume: str) -> list[Path]:
    """Rank 0's choice; folders without a readable manifest are told and left out."""
    if _rank() != 0:
        return []
    whole: list[tuple[int, Path]] = []
    for path in candidates(folder):
        try:
            serial = Manifest.read(path).serial
            if resume == AUTO or _same_place(_began_from(path), resume):
                whole.append((serial, path))
        except ManifestError as error:
            _warn(path, [str(error)])
    return [path for _, path in sorted(whole, reverse=True)]


def _began_from(path: Path) -> str | None:
    """What run.resume was for the run that saved a checkpoint; None where that is not known."""
    try:
        config = json.loads((path / STATE).read_text())["config"]
        return load_yaml(config or "")["run"]["resume"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None


def _same_place(begun: str | None, resume: str) -> bool:
    """Whether both name one folder, however each is written: with a slash at its end, from here or from the root."""
    if begun in (None, AUTO, NEVER):
        return False
    return Path(str(begun)).expanduser().resolve() == Path(resume).expanduser().resolve()


def _check_model(path: Path, mine: Tensors, stored: dict[str, TensorStorageMetadata]) -> None:
    """Compare what is stored with the tensors of all ranks together, so that all come to the same end."""
    tensors = over_all_ranks({name: (list(tensor.shape) or [1], str(tensor.dtype)) for name, tensor in mine.items()})
    held = {name: described for name, described in stored.items() if name.startswith(MODEL)}
    problems = []
    for what, names in (
        ("lacks tensors of this model", [name for name in tensors if name not in held]),
        ("holds tensors that this model does not have", [name for name in held if name not in tensors]),
    ):
        if names:
            listed = ", ".join(name.removeprefix(MODEL) for name in names[:SHOWN])
            problems.append(f"checkpoint {path} {what}: {listed}{', ...' if len(names) > SHOWN else ''}")
    for name in held.keys() & tensors.keys():
        there = (tuple(held[name].size), str(held[name].properties.dtype))
        shape, dtype = tensors[name]
        here = (tuple(shape), dtype)
        if there != here:
            problems.append(
                f"checkpoint {path}: {name.removeprefix(MODEL)} is {there[0]} {there[1]} there and {here[0]} "
                f"{here[1]} in this model (model.path, model.config, model.dtype)"
            )
    if problems:
        raise ConfigError(sorted(problems)[:SHOWN])


def _warn(path: Path, problems: list[str]) -> None:
    if _rank() == 0:
        logger.warning("checkpoint %s is not used: %s", path, "; ".join(problems))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
