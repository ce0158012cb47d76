"""Copy a checkpoint from an object store back to the run directory."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from components.checkpoint.checkpoint_error import fail_together
from components.checkpoint.folders import TEMPORARY
from components.checkpoint.manifest import MANIFEST, sync_folder
from components.checkpoint.remote.mirror import Mirror
from components.checkpoint.remote.remote_listing import find_remote
from components.exchange import all_gather_json, broadcast_json, this_rank
from components.storage.object_store import StoredObject
from components.storage.urls import name_of, shown_names

logger = logging.getLogger(__name__)


def fetch_checkpoint(
    mirror: Mirror, url: str, folder: Path, verify: Callable[[Path], list[str]]
) -> tuple[Path | None, list[str]]:
    """Copy the checkpoint at `url` into `folder`, and return its path and its problems. A collective.

    The ranks share the download by files: those that the manifest lists, whatever else is there. The copy is verified
    under a temporary name, and renamed if it is complete.

    Args:
        verify: Collective that returns the missing or damaged files of a folder, the same on every rank.

    Returns:
        The path, or None if the checkpoint is damaged; the problems, the same on every rank.

    Raises:
        CheckpointError: On every rank, if the store or the disk fails: that is no damage, and an older checkpoint would
            repeat steps.
    """
    failure = f"checkpoint {url} could not be copied to {folder}"
    tmp = folder / broadcast_json(f"{name_of(url)}{TEMPORARY}{secrets.token_hex(4)}")
    final = folder / name_of(url)
    listed: list[StoredObject] = []
    problems: list[str] = []
    with fail_together(failure):
        if this_rank() == 0:
            copy = find_remote(mirror.store, url)
            problems = copy.problems
            if copy.manifest is not None and not problems:
                if copy.strangers:
                    logger.warning("checkpoint %s: not of it, and left there: %s", url, shown_names(copy.strangers))
                tmp.mkdir(parents=True)
                listed = [copy.objects[name] for name in (MANIFEST, *copy.manifest.files)]
    listed, problems = broadcast_json([listed, problems])
    if problems:
        return None, problems
    listed = [StoredObject(*each) for each in listed]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    absent = []
    try:
        with fail_together(failure):
            for each in sorted(listed, key=lambda each: each.bytes, reverse=True)[rank::world]:
                try:
                    mirror.store.download(each, tmp / name_of(each.url))
                except FileNotFoundError:
                    absent.append(f"{name_of(each.url)} is missing")
        problems = [problem for part in all_gather_json(absent) for problem in part] or verify(tmp)
        if not problems:
            with fail_together(failure):
                if this_rank() == 0:
                    final = _publish(tmp, final)
    except BaseException:
        _remove(tmp)
        raise
    if problems:
        _remove(tmp)
        return None, problems
    return Path(broadcast_json(str(final))), []


def _publish(tmp: Path, final: Path) -> Path:
    """Rename the folder to `final`, or to the next free name like it if a damaged checkpoint occupies that."""
    sync_folder(tmp)
    name, again = final.name.partition(".")[0], 0
    while os.path.lexists(final):
        again += 1
        final = final.with_name(f"{name}.{again}")
    os.rename(tmp, final)
    sync_folder(final.parent)
    return final


def _remove(tmp: Path) -> None:
    if this_rank() == 0:
        shutil.rmtree(tmp, ignore_errors=True)
