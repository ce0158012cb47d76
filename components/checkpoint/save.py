"""Write a checkpoint to a temporary folder, then publish it by one rename; random states of a rank as JSON."""

from __future__ import annotations

import base64
import copy
import logging
import math
import os
import random
import shutil
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from components.checkpoint.manifest import (
    BASE_FINGERPRINT,
    FileRecord,
    Manifest,
    fail_together,
    published,
    random_file,
    reasons_to_keep,
    remove,
    sync_folder,
    write_json,
)
from components.checkpoint.stored_tensors import base_fingerprint, write_tensors
from components.checkpoint.tensors import (
    Optimizers,
    Tensors,
    merge_over_ranks,
    model_tensors,
    optimizer_tensors,
)
from components.config.schema.run import CheckpointConfig
from components.json_collectives import all_gather_json, broadcast_json, this_rank, world_size
from components.protocol.run_files import (
    CHECKPOINT_STATE,
    CHECKPOINTS,
    CONFIG,
    checkpoint_name,
    temporary_name,
    unfinished_checkpoints,
)
from components.watch.faults import fault_point

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """Input of the retention policy for one checkpoint, besides its step; the same on every rank."""

    eval_loss: float | None = None
    """Held-out loss at this step; None if this step was not evaluated."""
    ephemeral: bool = False
    """Saved by checkpoint.every_minutes: removed once a newer checkpoint is complete."""
    eval_reward: float | None = None
    """Held-out reward at this step; None if this step was not evaluated, or by its loss."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of this rank at the end of a step, ready to be written."""

    step: int
    tensors: Tensors
    """Parameters, buffers, optimizer state and average of this rank."""
    random: dict[str, Any]
    """Random state of this rank."""
    extra: dict[str, Any]
    mark: Mark
    mesh: dict[str, int]
    """Size of each mesh axis, and the number of processes as `world`."""
    base_fingerprint: str | None = None
    """Fingerprint of the base weights of a LoRA run, which are not saved; None without adapters."""


def save_checkpoint(
    run_dir: Path | str,
    step: int,
    model: nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any],
    policy: CheckpointConfig,
    mark: Mark | None = None,
) -> Path:
    """Save the complete state of a run as `run_dir/checkpoints/step_<step>` and return that folder; a collective.

    Call it between two optimizer steps, with or without a process group. Each rank writes its own shards and its random
    state to `step_<step>.tmp-<attempt>`. All files are synced to disk before the manifest is written, and one rename
    publishes the folder: a published checkpoint is complete, whichever process is killed at whatever time. A published
    folder is never written to again: a step that is saved a second time becomes `step_<step>.1`.

    Args:
        extra: State that is not a tensor (counters, data position), as JSON values; the same on every rank.
        policy: The complete checkpoints to keep. The others, and leftovers of killed attempts, are removed.
        mark: Input of the policy; None: the defaults.

    Raises:
        CheckpointError: On every rank if one of them could not write, with the path and the required and free bytes.
            Earlier checkpoints are untouched.
        TypeError: `extra` contains values that JSON cannot represent exactly.
    """
    snapshot = take_snapshot(step, model, optimizer, extra, mark, base_fingerprint(model))
    return write_snapshot(run_dir, snapshot, policy)


def take_snapshot(
    step: int,
    model: nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any],
    mark: Mark | None = None,
    fingerprint: str | None = None,
    average: Tensors | None = None,
) -> Snapshot:
    """Return the state of this rank without copying tensors: the next step overwrites them. A collective.

    Other arguments and errors as in `save_checkpoint`.

    Args:
        fingerprint: Result of `base_fingerprint`, which reads all base weights; they do not change during a run, so
            that computing it once is enough.
        average: `WeightAverage.tensors`; None: no average is saved.
    """
    _check_json(extra, "extra")
    tensors = model_tensors(model)
    tensors |= optimizer_tensors(optimizer, tensors) | (average or {})
    return Snapshot(step, tensors, random_state(), copy.deepcopy(extra), mark or Mark(), mesh_of(tensors), fingerprint)


def write_snapshot(
    run_dir: Path | str,
    snapshot: Snapshot,
    policy: CheckpointConfig,
    group: dist.ProcessGroup | None = None,
    after: int = 0,
    damaged: Collection[Path] = (),
) -> Path:
    """Write and publish the snapshots of all ranks, as described in `save_checkpoint`; a collective.

    Args:
        after: Its serial is above this one and those in the folder.
        group: Process group of all ranks; None: the default group. A background thread needs a group that only it uses:
            collectives of two threads in one group could start in a different order on each rank.
        damaged: Checkpoints that the policy does not count, and that are not removed.
    """
    folder = Path(run_dir) / CHECKPOINTS
    tmp = folder / broadcast_json(temporary_name(checkpoint_name(snapshot.step)), group=group)
    failure = partial(_write_failure, tmp, snapshot.tensors, group)
    try:
        with fail_together(failure, group):
            tmp.mkdir(parents=True, exist_ok=True)
            fault_point("after_folder")
        with fail_together(failure, group):
            written = write_tensors(tmp, snapshot.tensors, group)
            fault_point("after_shards")
            written |= write_json(tmp / random_file(this_rank()), snapshot.random)
            fault_point("after_random")
        by_rank = all_gather_json({name: asdict(record) for name, record in written.items()}, group)
        records = {name: FileRecord(**record) for listed in by_rank for name, record in listed.items()}
        final = folder
        with fail_together(failure, group):
            if this_rank() == 0:
                final = _publish(tmp, snapshot, records, after)
    except BaseException:
        if this_rank() == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    if this_rank() == 0:
        _prune(folder, policy, damaged)
    return Path(broadcast_json(str(final), group=group))


def mesh_of(tensors: Tensors) -> dict[str, int]:
    """Return the size of each axis of the tensors' device mesh, and the number of processes as `world`."""
    meshes = [tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)]
    axes: dict[str, int] = {}
    for mesh in meshes:
        root = mesh._get_root_mesh()
        axes |= dict(zip(root.mesh_dim_names or (), root.shape, strict=False))
    return {"world": world_size(), **axes}


def _write_failure(tmp: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> str:
    """Return the start of the message about a failed write, with the required and the free bytes; a collective.

    The required bytes are those of all ranks' tensors, without the small random state file of each rank. The free bytes
    are measured by rank 0 and include what the failed attempt occupies, which is removed.
    """
    sizes = merge_over_ranks({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}, group)
    free = broadcast_json(_free_bytes(tmp), group=group)
    free_text = "" if free is None else f", {tmp.parent} has room for {free:,}"
    return f"checkpoint {tmp} could not be written (its tensors are {sum(sizes.values()):,} bytes{free_text})"


def _free_bytes(tmp: Path) -> int | None:
    """Return the bytes that are free without the failed attempt; None if the file system cannot be queried."""
    existing = next((folder for folder in (tmp, *tmp.parents) if folder.exists()), tmp)
    try:
        return shutil.disk_usage(existing).free + sum(file.stat().st_blocks * 512 for file in tmp.glob("*"))
    except OSError:
        return None


def _publish(tmp: Path, snapshot: Snapshot, records: dict[str, FileRecord], after: int = 0) -> Path:
    missing = sorted(name for name in records if not (tmp / name).is_file())
    if missing:
        raise OSError(
            f"rank 0 cannot find {', '.join(missing)}, which other ranks wrote: set run.dir to a folder on a file "
            "system that all nodes share"
        )
    config = tmp.parent.parent / CONFIG  # stored so that a run that starts from here can report the changed settings
    step, mark = snapshot.step, snapshot.mark
    state = {"step": step, "extra": snapshot.extra, "config": config.read_text("utf-8") if config.is_file() else None}
    if snapshot.base_fingerprint is not None:
        state[BASE_FINGERPRINT] = snapshot.base_fingerprint
    records |= write_json(tmp / CHECKPOINT_STATE, state)
    earlier = published(tmp.parent)
    manifest = Manifest(
        step=step,
        serial=1 + max((after, *(manifest.serial for _, manifest in earlier))),
        mesh=snapshot.mesh,
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
        files=dict(sorted(records.items())),
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        eval_loss=_finite(mark.eval_loss),
        eval_reward=_finite(mark.eval_reward),
        ephemeral=mark.ephemeral,
    )
    fault_point("before_manifest")
    manifest.write(tmp)
    fault_point("after_manifest")
    sync_folder(tmp)
    final, again = tmp.parent / checkpoint_name(step), 0
    while os.path.lexists(final):  # not exists(): a broken symlink occupies the name too
        again += 1
        final = tmp.parent / checkpoint_name(step, again)
    fault_point("before_rename")
    os.rename(tmp, final)
    fault_point("after_rename")
    sync_folder(tmp.parent)
    sync_folder(tmp.parent.parent)
    return final


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _prune(folder: Path, policy: CheckpointConfig, damaged: Collection[Path] = ()) -> None:
    """Remove complete checkpoints that the policy does not keep, and leftovers of killed attempts.

    Those in `damaged` and those with missing or truncated files are neither counted nor removed.
    """
    try:
        complete = [
            (path, manifest)
            for path, manifest in published(folder)
            if path not in damaged and not manifest.check_sizes(path)
        ]
        reasons = reasons_to_keep([manifest for _, manifest in complete], policy)
        remove(path for (path, _), reason in zip(complete, reasons, strict=True) if not reason)
        remove(unfinished_checkpoints(folder))
    except OSError as error:
        logger.warning("old checkpoints in %s could not be removed: %s", folder, error)


def _check_json(value: Any, where: str) -> None:
    """Raise TypeError for values that JSON would change, such as tuples and keys that are not strings."""
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


def random_state() -> dict[str, Any]:
    """Return this rank's random state as JSON values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `random_state`."""
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _decode(state: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8)
