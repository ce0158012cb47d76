"""Choose a complete checkpoint and restore its state on any mesh, or read its weights block by block in one process."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from components.checkpoint.manifest import (
    BASE_FINGERPRINT,
    CheckpointError,
    Manifest,
    ManifestError,
    fail_together,
    may_be_intact,
    newest_complete,
    random_file,
)
from components.checkpoint.mirror import Mirror, fetch_checkpoint
from components.checkpoint.save import mesh_of, set_random_state
from components.checkpoint.stored_tensors import (
    CheckpointTensor,
    base_fingerprint,
    check_base_weights,
    find_checkpoint_tensors,
    fingerprint_by_blocks,
    read_tensors,
)
from components.checkpoint.tensors import (
    AVERAGE,
    AVERAGE_UPDATES,
    MODEL,
    Optimizers,
    Tensors,
    make_optimizer_state,
    merge_over_ranks,
    model_tensors,
    restore_numbers,
)
from components.config.schema.run import is_same_checkpoint
from components.json_collectives import all_gather_json, broadcast_json, this_rank, world_size
from components.models.weights.shards import Index, local_part
from components.protocol.errors import ConfigError
from components.protocol.run_files import (
    CHECKPOINT_MANIFEST,
    CHECKPOINT_STATE,
    CHECKPOINTS,
    TEMPORARY,
    checkpoint_folders,
    checkpoint_step,
)
from components.protocol.safe_parsing import LARGEST, load_json, load_yaml, parse_json, read_regular
from components.storage.object_store import is_url, shown_names
from components.watch.faults import fault_point

logger = logging.getLogger(__name__)

_AUTO, _NEVER = "auto", "never"
STORED_DTYPE = "dtype"
"""Key of a checkpoint's `extra` for the dtype of the run's parameters."""
_SHOWN = 8
"""Names listed in an error."""


def find_checkpoint(
    run_dir: Path | str, resume: str, mirror: Mirror | None = None, skipped: list[Path] | None = None
) -> Path | None:
    """Return the checkpoint to resume from, fully verified and the same on every rank; None to start from scratch.

    Rank 0 orders the candidates by their manifests; the ranks share the work of verifying the hashes. A collective.

    Args:
        resume: "auto": the newest complete checkpoint of `run_dir`; a damaged one is skipped with a warning that names
            the file. "never": the same without `mirror`, so that a requeued job continues: the launcher rejects "never"
            for a directory with checkpoints, so all of them were saved since that start. Otherwise the path of a
            checkpoint to start from; checkpoints that `run_dir` has saved since it started from that path take
            precedence, for the same reason.
        mirror: The run's copies in an object store. One that is newer than all intact checkpoints of `run_dir` is
            copied there, verified and returned; a damaged one is skipped like others.
        skipped: Extended by the damaged checkpoints of `run_dir`, for `Saver.damaged`.

    Raises:
        CheckpointError: On every rank, if the store of `mirror` or a file cannot be read. That is no damage: an older
            checkpoint would repeat steps, and retention would then remove the newer ones.
        ConfigError: `resume` is the path of something that is not a complete checkpoint, or there are checkpoints, but
            all are damaged.
    """
    if resume == _NEVER:
        resume, mirror = _AUTO, None  # the copies may be of an earlier run
    folder = Path(run_dir) / CHECKPOINTS
    places: list[str] = []
    damaged: list[str] = []
    with fail_together(f"the checkpoints of {run_dir} could not be listed"):
        if this_rank() == 0:
            places, damaged = _newest_first(folder, resume, mirror)
    places, damaged = broadcast_json([places, damaged])
    for place in places:
        if mirror is not None and is_url(place):
            path, problems = fetch_checkpoint(mirror, place, folder, verify)
        else:
            path, problems = Path(place), verify(Path(place))
        if not problems:
            return path
        _warn(place, problems)
        damaged.append(place)
        if mirror is not None and is_url(place):
            mirror.damaged.append(place)
        elif skipped is not None:
            skipped.append(Path(place))
    if resume == _AUTO:
        if damaged:
            raise ConfigError(
                f"run.dir={run_dir}: all of its checkpoints are damaged or incomplete: {', '.join(damaged[:_SHOWN])}; "
                "restore one of them, or remove them or choose another run.dir to start over"
            )
        return None
    path = Path(resume).expanduser()
    if problems := verify(path):
        raise ConfigError(f"run.resume={resume}: not a complete checkpoint: {'; '.join(problems)}")
    return path


def locate_checkpoint(path: Path | str) -> Path:
    """Return `path` if it is not a run directory, else the run's newest complete checkpoint, the same on every rank.

    Only the sizes of files are checked. An incomplete checkpoint is skipped with a warning. A collective.

    Raises ConfigError on every rank if the run has no complete checkpoint.
    """
    path, problem = Path(path).expanduser(), None
    if this_rank() == 0 and (path / CHECKPOINTS).is_dir():
        try:
            path, incomplete = newest_complete(path)
        except ConfigError as error:
            problem = str(error)
        else:
            for line in incomplete:
                logger.warning(line)
    located, problem = broadcast_json([str(path), problem])
    if problem is not None:
        raise ConfigError(problem)
    return Path(located)


def verify(path: Path) -> list[str]:
    """Return the missing or damaged files of a checkpoint, the same list on every rank; a collective.

    The ranks share the work: each verifies every world-size-th block of the files.

    Raises CheckpointError on every rank if a file cannot be read although it may be intact.
    """
    problems: list[str] = []
    body: dict[str, Any] = {}
    failure = (
        f"checkpoint {path} could not be read, which is no damage (repeat the command, or name another checkpoint: "
        "run.resume=PATH)"
    )
    with fail_together(failure):
        if this_rank() == 0:
            try:
                manifest = Manifest.read(path)
                body, problems = manifest.body(), manifest.check_sizes(path)
                if not problems and (strangers := manifest.strangers(path)):
                    logger.warning("checkpoint %s: not of it, and not read: %s", path, shown_names(strangers))
            except ManifestError as error:
                problems = _problems_of(error)
    body, problems = broadcast_json([body, problems])
    if problems:
        return problems
    mine: list[str] = []
    with fail_together(failure):
        mine = Manifest.from_body(body).check_hashes(path, this_rank(), world_size())
    return [problem for part in all_gather_json(mine) for problem in part]


def load_checkpoint(
    path: Path | str, model: nn.Module, optimizer: Optimizers, average: Tensors | None = None
) -> dict[str, Any]:
    """Restore the state that `save_checkpoint` wrote, and return its `extra`; a collective.

    A checkpoint can be loaded on any mesh, with or without pipeline stages. Parameters, optimizer state and counters
    are restored bit for bit. Random states are restored only on the mesh that wrote them; otherwise the ranks keep
    theirs, and that is logged. Hyperparameters are not restored: those of `optimizer` apply. Only file sizes are
    checked here: take the path from `find_checkpoint`, which verifies the contents.

    Args:
        average: `WeightAverage.tensors`, filled if the checkpoint holds an average; None: it is not loaded.

    Raises:
        ConfigError: The checkpoint does not match this model: missing or unexpected tensors, other shapes or dtypes, or
            adapters that were trained on other base weights.
        CheckpointError: On every rank, if one of them could not read.
    """
    path = Path(path)
    with fail_together(f"checkpoint {path} could not be read"):
        fault_point("at_load")
        manifest = Manifest.read(path)
        if problems := manifest.check_sizes(path, this_rank(), world_size()):
            raise ManifestError("; ".join(problems))
        saved = load_json(path / CHECKPOINT_STATE)
    stored = find_checkpoint_tensors(path, manifest)
    parameters = model_tensors(model)
    _check_model(path, parameters, stored.by_name)
    check_base_weights(path, saved.get(BASE_FINGERPRINT), base_fingerprint(model))
    average = dict(average) if average is not None and _holds_average(stored.by_name) else {}
    if average:
        _check_average(path, average, stored.by_name, parameters)
    # The average of a parameter that was frozen until now is its weight.
    begins = {name: average.pop(name) for name in list(average) if name not in stored.by_name}
    described = {name: (each.shape, each.dtype) for name, each in stored.by_name.items()}
    tensors = parameters | make_optimizer_state(optimizer, parameters, described) | average
    with fail_together(f"checkpoint {path} could not be read"):
        read_tensors(stored, tensors)
        restore_numbers(optimizer, parameters, tensors)
        for name, each in begins.items():
            local_part(each).copy_(local_part(parameters[MODEL + name.removeprefix(AVERAGE)]))
        mesh = mesh_of(parameters)
        if manifest.mesh == mesh:
            set_random_state(load_json(path / random_file(this_rank())))
        elif this_rank() == 0:
            logger.info(
                "random states are not restored: they were saved on the mesh %s, this run has %s", manifest.mesh, mesh
            )
    return saved["extra"]


def load_model_weights(path: Path | str, model: nn.Module, *, averaged: bool = False) -> None:
    """Verify a checkpoint and load its parameters and buffers into `model`, for evaluation; a collective.

    For a model with adapters, the checkpoint holds the adapters only; the base weights must be loaded already.

    Args:
        averaged: Load the moving average of the trained weights instead of the weights, cast to their dtypes.

    Raises:
        ConfigError: Not a complete checkpoint, or one of another model, or its adapters were trained on other base
            weights.
        CheckpointError: On every rank, if one of them could not read.
    """
    path = Path(path).expanduser()
    if problems := verify(path):
        raise ConfigError(f"{path}: not a complete checkpoint: {'; '.join(problems)}")
    parameters = model_tensors(model)
    with fail_together(f"checkpoint {path} could not be read"):
        manifest = Manifest.read(path)
        fingerprint = load_json(path / CHECKPOINT_STATE).get(BASE_FINGERPRINT)
    stored = find_checkpoint_tensors(path, manifest)
    _check_model(path, parameters, stored.by_name)
    check_base_weights(path, fingerprint, base_fingerprint(model))
    averages: Tensors = {}
    if averaged:
        has_average = any(name.startswith(AVERAGE) for name in stored.by_name)
        for name, each in parameters.items():
            # The run may have frozen some of them (training.freeze): their weights are their averages.
            if each.requires_grad and not (has_average and AVERAGE + name.removeprefix(MODEL) not in stored.by_name):
                dtype = torch.promote_types(each.dtype, torch.float32)
                averages[AVERAGE + name.removeprefix(MODEL)] = torch.zeros_like(each, dtype=dtype, requires_grad=False)
        _check_average(path, averages, stored.by_name)
    with fail_together(f"checkpoint {path} could not be read"):
        read_tensors(stored, parameters | averages)
    with torch.no_grad():
        for name, each in averages.items():
            local_part(parameters[MODEL + name.removeprefix(AVERAGE)]).copy_(local_part(each))


def stored_dtype_of(path: Path | str) -> str | None:
    """Return the dtype of the parameters of the run that saved a checkpoint; None if state.json does not record it.

    Older runs recorded it in their config only.
    """
    try:
        state = load_json(Path(path).expanduser() / CHECKPOINT_STATE)
        dtype = state["extra"].get(STORED_DTYPE) or load_yaml(state["config"] or "")["model"]["dtype"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return None
    return None if dtype == _AUTO else str(dtype)


def _holds_average(stored: Iterable[str]) -> bool:
    """Return whether the names of stored tensors include a moving average of the weights."""
    return any(name.startswith(AVERAGE) for name in stored)


def _newest_first(folder: Path, resume: str, mirror: Mirror | None = None) -> tuple[list[str], list[str]]:
    """Return the candidates for resuming, newest first, as paths and URLs, and those without a valid manifest.

    A checkpoint of the folder precedes its copy. Warns about manifests that are not valid. Raises OSError.
    """
    usable: list[tuple[int, bool, str]] = []
    damaged: list[str] = []
    for path in checkpoint_folders(folder):
        try:
            serial = Manifest.read(path).serial
            if resume == _AUTO or is_same_checkpoint(_began_from(_content(path / CHECKPOINT_STATE)), resume):
                usable.append((serial, True, str(path)))
        except ManifestError as error:
            _warn(path, _problems_of(error))
            damaged.append(str(path))
    for each in [] if mirror is None else mirror.copies():
        if mirror is None or each.manifest is None:
            if each.damage:
                _warn(each.url, [each.damage])
                damaged += [each.url] * (mirror is not None and mirror.has_written(each.name))
            continue
        state = b""
        if resume != _AUTO and CHECKPOINT_STATE in each.objects:
            state = mirror.store.read(each.objects[CHECKPOINT_STATE].url)
        if resume == _AUTO or is_same_checkpoint(_began_from(state), resume):
            usable.append((each.manifest.serial, False, each.url))
    return [place for _, _, place in sorted(usable, reverse=True)], damaged


def _problems_of(error: ManifestError) -> list[str]:
    """Return the error as the problem of a checkpoint; raise its OSError if the manifest may be intact."""
    if may_be_intact(cause := error.__cause__) and cause is not None:
        raise cause
    return [str(error)]


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, LARGEST)
    except OSError as error:
        if may_be_intact(error):
            raise
        return b""


def _began_from(state: bytes) -> str | None:
    """Return the run.resume of the run that saved a checkpoint; None if its state.json does not contain it."""
    try:
        resume = load_yaml(str(parse_json(state)["config"] or ""))["run"]["resume"]
    except (ValueError, LookupError, TypeError, yaml.YAMLError):
        return None
    return resume if isinstance(resume, str) else None


def _compare_names(path: Path, expected: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return an error if the checkpoint lacks tensors of the model, and one if it holds unexpected ones."""
    differences = {
        "lacks tensors of this model": [name for name in expected if name not in saved],
        "holds tensors that this model does not have": [name for name in saved if name not in expected],
    }
    return [
        f"checkpoint {path} {problem}: {', '.join(name.removeprefix(MODEL) for name in names[:_SHOWN])}"
        f"{', ...' if len(names) > _SHOWN else ''}"
        for problem, names in differences.items()
        if names
    ]


def _check_model(path: Path, local: Tensors, stored: Mapping[str, CheckpointTensor]) -> None:
    """Compare the stored names, shapes and dtypes with the tensors of all ranks; every rank raises the same error."""
    tensors = merge_over_ranks({name: (list(tensor.shape) or [1], str(tensor.dtype)) for name, tensor in local.items()})
    saved = {name: described for name, described in stored.items() if name.startswith(MODEL)}
    problems = _compare_names(path, tensors, saved)
    for name in saved.keys() & tensors.keys():
        saved_as = (saved[name].shape, str(saved[name].dtype))
        shape, dtype = tensors[name]
        expected = (tuple(shape), dtype)
        if saved_as != expected:
            problems.append(
                f"checkpoint {path}: {name.removeprefix(MODEL)} is {saved_as[0]} {saved_as[1]} in the checkpoint and "
                f"{expected[0]} {expected[1]} in this model; set model.path, model.config and model.dtype as in the "
                "run that saved it"
            )
    if problems:
        raise ConfigError(sorted(problems)[:_SHOWN])


def _check_average(
    path: Path, local: Tensors, stored: Mapping[str, CheckpointTensor], parameters: Tensors | None = None
) -> None:
    """Require the stored average to have the parameters of all ranks; every rank raises the same error.

    `parameters`: those of a model that may train others of them than the run that saved the average did."""
    if not _holds_average(stored):
        raise ConfigError(
            f"checkpoint {path}: holds no moving average of the weights: its run had no training.ema_decay"
        )
    expected = merge_over_ranks({name: True for name in local if name != AVERAGE_UPDATES})
    saved = {name: True for name in stored if name.startswith(AVERAGE)}
    if parameters is not None:
        all_names = merge_over_ranks({AVERAGE + name.removeprefix(MODEL): True for name in parameters})
        both = all_names.keys() & {AVERAGE + name.removeprefix(MODEL) for name in stored}
        if this_rank() == 0 and (frozen := sorted(both & saved.keys() - expected.keys())):
            names = shown_names([name.removeprefix(AVERAGE) for name in frozen])
            logger.warning("averages of parameters that are frozen now are dropped: %s", names)
        expected, saved = ({name: True for name in each if name not in both} for each in (expected, saved))
    if problems := _compare_names(path, expected, saved):
        raise ConfigError(problems)


def _warn(path: Path | str, problems: list[str]) -> None:
    if this_rank() == 0:
        logger.warning("checkpoint %s is skipped: %s", path, "; ".join(problems))


def choose_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint if it is a run directory.

    Raises:
        ConfigError: There is no checkpoint, or one of the run directory has no valid manifest: it might be the newest.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a run directory, or a checkpoint: RUN_DIR/checkpoints/step_N")
    if TEMPORARY in path.name:
        raise ConfigError(f"{path}: an unfinished save; give a complete checkpoint: RUN_DIR/checkpoints/step_N")
    if (path / CHECKPOINT_MANIFEST).exists() or checkpoint_step(path.name) is not None:
        return path
    if not (path / CHECKPOINTS).is_dir():
        raise ConfigError(
            f"{path}: neither a checkpoint (no {CHECKPOINT_MANIFEST}) nor a run directory (no {CHECKPOINTS}/); give "
            "one of them"
        )
    serials: dict[Path, int] = {}
    problems = []
    for candidate in checkpoint_folders(path / CHECKPOINTS):
        try:
            serials[candidate] = Manifest.read(candidate).serial
        except ManifestError as error:
            problems.append(f"{candidate}: not a complete checkpoint: {error}; give the path of another one")
    if problems:
        raise ConfigError(problems)
    if not serials:
        raise ConfigError(f"{path}: no complete checkpoint in {CHECKPOINTS}/; give a run directory that has one")
    return max(serials, key=lambda candidate: serials[candidate])


class StoredWeights:
    """Parameters and buffers of a checkpoint, by their names in the model."""

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        """Verify every file of the checkpoint and read the safetensors headers. Raises ConfigError.

        Args:
            averaged: Read the moving average of the trained weights in place of the weights.
        """
        try:
            problems = verify(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        if problems:
            raise ConfigError(f"{path}: not a complete checkpoint: {'; '.join(problems)}")
        self.manifest = Manifest.read(path)
        state = load_json(path / CHECKPOINT_STATE)
        self.extra: dict[str, Any] = state["extra"]
        self.base_fingerprint: str | None = state.get(BASE_FINGERPRINT)
        self._path = path
        self._stored = find_checkpoint_tensors(path, self.manifest)
        self._names = self._with_prefix(MODEL)
        if averaged:
            average = self._with_prefix(AVERAGE)
            if not average:
                raise ConfigError(f"{path}: holds no moving average of the weights: its run had no training.ema_decay")
            self._names |= average

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Compare the stored names and shapes with the tensors of a model. Raises ConfigError."""
        saved = {name: self._stored.by_name[stored] for name, stored in self._names.items()}
        problems = _compare_names(self._path, expected, saved)
        for name in saved.keys() & expected.keys():
            saved_shape, shape = saved[name].shape, tuple(expected[name].shape) or (1,)
            stored = saved[name].numel
            if saved_shape != shape:
                problems.append(
                    f"checkpoint {self._path}: {name} is {saved_shape} in the checkpoint and {shape} in this model"
                )
            elif stored != math.prod(shape):
                problems.append(f"checkpoint {self._path}: {name} has {stored} of its {math.prod(shape)} values")
        if problems:
            raise ConfigError(sorted(problems)[:_SHOWN])

    def check_base_weights(self, base: Mapping[str, torch.Tensor], read: Callable[[str, Index], torch.Tensor]) -> None:
        """Compare the stored fingerprint with that of the base weights that `read` loads. Raises ConfigError.

        Args:
            base: The base parameters; only names and shapes are used.
        """
        check_base_weights(self._path, self.base_fingerprint, fingerprint_by_blocks(base, read))

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Return the block `index` of a tensor in the stored dtype; nothing else is read. Raises OSError."""
        stored = self._names[name]
        wanted = index or (slice(0, 1),)  # a scalar is stored with shape (1,)
        dtype = self._stored.by_name[stored].dtype
        values = torch.empty([each.stop - each.start for each in wanted], dtype=dtype)
        # Opens the files again for each block: while one is mapped, all pages read so far count as resident memory.
        self._stored.fill([(stored, wanted, values)])
        return values if index else values[0]

    def _with_prefix(self, prefix: str) -> dict[str, str]:
        """Return the stored names that have a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): name for name in self._stored.by_name if name.startswith(prefix)}
