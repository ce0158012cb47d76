"""Write a checkpoint: all of it under a temporary name, then one rename."""

from __future__ import annotations

import copy
import logging
import math
import os
import secrets
import shutil
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from components.checkpoint.base_fingerprint import frozen_fingerprint
from components.checkpoint.checkpoint_error import agreed
from components.checkpoint.disk_space import not_written
from components.checkpoint.folders import FOLDER, FROZEN, STATE, TEMPORARY, leftovers, published, random_file
from components.checkpoint.manifest import FileRecord, Manifest, sync_folder, write_json
from components.checkpoint.random_state import random_state
from components.checkpoint.retention import reasons_to_keep, remove
from components.checkpoint.tensors import Optimizers, Tensors, model_tensors, optimizer_tensors, write_tensors
from components.config.schema.checkpoint import CheckpointConfig
from components.exchange import all_gather_json, broadcast_json
from components.protocol.run_files import CONFIG
from components.resilience.faults import fault_point

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """What decides, besides its step, how long a checkpoint stays; the same on every rank."""

    eval_loss: float | None = None
    """Evaluation loss of this very step; None where it was not evaluated."""
    ephemeral: bool = False
    """Saved because time had passed: it goes as soon as a newer one is complete."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be saved, as it is at the end of a step."""

    step: int
    tensors: Tensors
    """Of this rank: parameters, buffers, optimizer state."""
    random: dict[str, Any]
    """Of this rank."""
    extra: dict[str, Any]
    mark: Mark
    mesh: dict[str, int]
    frozen: str | None = None
    """Fingerprint of the weights beside adapters, which are not saved; None where there are no adapters."""


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    model: nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any],
    policy: CheckpointConfig,
    mark: Mark | None = None,
) -> Path:
    """Save the whole state of a run as `run_dir/checkpoints/step_<step>` and return that folder.

    Call it on all ranks between two optimizer steps, with or without a process group. Each rank writes its own shards
    and its random state. Everything goes to `step_<step>.tmp-<attempt>` and is on disk before the manifest is; one
    rename publishes it, so that whatever is killed whenever, a published checkpoint is complete. A published name is
    never written to again: a step that is saved a second time becomes `step_<step>.1`.

    Args:
        extra: What is not a tensor (counters, data cursor), as JSON values; the same on every rank.
        policy: Which complete checkpoints stay; the others, and what killed attempts left, are removed.
        mark: What is known of it that the policy asks for; None: nothing.

    Raises:
        CheckpointError: On every rank, when one of them could not write, with the path and the bytes; what was
            published before is untouched.
        TypeError: `extra` would not come back from JSON as it is.
    """
    snapshot = take_snapshot(step, model, optimizer, extra, mark, frozen_fingerprint(model))
    return write_snapshot(run_dir, snapshot, policy)


def take_snapshot(
    step: int,
    model: nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any],
    mark: Mark | None = None,
    frozen: str | None = None,
) -> Snapshot:
    """Return the state of a run; a collective. Its tensors are the run's own, which the next step changes.

    Arguments and errors are those of `save_checkpoint`.

    Args:
        frozen: From `frozen_fingerprint`, which reads the whole model: once per run is enough.
    """
    _check_json(extra, "extra")
    tensors = model_tensors(model)
    tensors |= optimizer_tensors(optimizer, tensors)
    return Snapshot(step, tensors, random_state(), copy.deepcopy(extra), mark or Mark(), mesh_of(tensors), frozen)


def write_snapshot(
    run_dir: Path | str, snapshot: Snapshot, policy: CheckpointConfig, group: dist.ProcessGroup | None = None
) -> Path:
    """Write and publish what `take_snapshot` returned on each rank, as `save_checkpoint` tells.

    Args:
        group: All ranks; None: the default group. A thread beside training needs one of its own, for the order of
            collectives within a group is the same on all ranks only if a single thread calls them.
    """
    folder = Path(run_dir) / FOLDER
    tmp = folder / broadcast_json(f"step_{snapshot.step}{TEMPORARY}{secrets.token_hex(4)}", group=group)
    failed = partial(not_written, tmp, snapshot.tensors, group)
    try:
        with agreed(failed, group):
            tmp.mkdir(parents=True, exist_ok=True)
            fault_point("after_folder")
        with agreed(failed, group):
            own = write_tensors(tmp, snapshot.tensors, group)
            fault_point("after_shards")
            own |= write_json(tmp / random_file(_rank()), snapshot.random)
            fault_point("after_random")
        listed = all_gather_json({name: asdict(record) for name, record in own.items()}, group)
        records = {name: FileRecord(**record) for part in listed for name, record in part.items()}
        final = folder
        with agreed(failed, group):
            if _rank() == 0:
                final = _publish(tmp, snapshot, records)
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    if _rank() == 0:
        _prune(folder, policy)
    return Path(broadcast_json(str(final), group=group))


def mesh_of(tensors: Tensors) -> dict[str, int]:
    """Return the axes of the mesh that the tensors are laid over, and the number of processes as `world`."""
    meshes = [tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)]
    axes: dict[str, int] = {}
    for mesh in meshes:
        root = mesh._get_root_mesh()
        axes |= dict(zip(root.mesh_dim_names or (), root.shape, strict=False))
    return {"world": dist.get_world_size() if dist.is_initialized() else 1, **axes}


def _publish(tmp: Path, snapshot: Snapshot, records: dict[str, FileRecord]) -> Path:
    unseen = sorted(name for name in records if not (tmp / name).is_file())
    if unseen:
        raise OSError(f"rank 0 does not see {', '.join(unseen)}: run.dir must be on a file system that all nodes share")
    config = tmp.parent.parent / CONFIG  # so that whoever goes on from here in another run is told what he changes
    step, mark = snapshot.step, snapshot.mark
    state = {"step": step, "extra": snapshot.extra, "config": config.read_text() if config.is_file() else None}
    if snapshot.frozen is not None:
        state[FROZEN] = snapshot.frozen
    records |= write_json(tmp / STATE, state)
    earlier = published(tmp.parent)
    manifest = Manifest(
        step=step,
        serial=1 + max((known.serial for _, known in earlier), default=0),
        mesh=snapshot.mesh,
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
        files=dict(sorted(records.items())),
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        eval_loss=mark.eval_loss if mark.eval_loss is not None and math.isfinite(mark.eval_loss) else None,
        ephemeral=mark.ephemeral,
    )
    fault_point("before_manifest")
    manifest.write(tmp)
    fault_point("after_manifest")
    sync_folder(tmp)
    final, again = tmp.parent / f"step_{step}", 0
    while os.path.lexists(final):  # a link that leads nowhere takes the name too
        again += 1
        final = tmp.parent / f"step_{step}.{again}"
    fault_point("before_rename")
    os.rename(tmp, final)
    fault_point("after_rename")
    sync_folder(tmp.parent)
    sync_folder(tmp.parent.parent)
    return final


def _prune(folder: Path, policy: CheckpointConfig) -> None:
    """Remove complete checkpoints that the policy does not keep, and what attempts that were killed left behind.

    Those with files missing or cut short are not counted, and not removed.
    """
    try:
        complete = [(path, manifest) for path, manifest in published(folder) if not manifest.check_sizes(path)]
        reasons = reasons_to_keep([manifest for _, manifest in complete], policy)
        remove(path for (path, _), why in zip(complete, reasons, strict=True) if not why)
        remove(leftovers(folder))
    except OSError as error:
        logger.warning("old checkpoints in %s could not be removed: %s", folder, error)


def _check_json(value: Any, where: str) -> None:
    """JSON has no tuples, and no keys but strings; such values would come back as others."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: keys must be strings to be saved")
            _check_json(inner, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{where} is a {type(value).__name__}: only JSON values can be saved")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
