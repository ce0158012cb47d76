"""The checkpoints of a run directory, their problems, the retention policy and safe removal. Imports no torch."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.checkpoint.manifest import Manifest, ManifestError
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from components.protocol.run_files import (
    CHECKPOINT_MANIFEST,
    CHECKPOINTS,
    TEMPORARY,
    checkpoint_folders,
    temporary_name,
    unfinished_checkpoints,
)
from components.storage.object_store import shown_names
from components.watch.faults import fault_point

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ListedCheckpoint:
    """A folder that is named like a checkpoint."""

    path: Path
    manifest: Manifest | None
    """None if it is missing or damaged."""
    problems: list[str]
    """Missing or damaged files; empty if the checkpoint is complete."""
    reasons: list[str]
    """Why the policy keeps it. Empty: it may be removed, or it is incomplete and so never removed."""


def list_checkpoints(run_dir: Path, policy: CheckpointConfig) -> list[ListedCheckpoint]:
    """Return an entry for each checkpoint folder, oldest first; only the sizes of files are checked."""
    entries = [_entry(path) for path in checkpoint_folders(run_dir / CHECKPOINTS)]
    entries.sort(key=lambda entry: (entry.manifest.serial if entry.manifest else 0, entry.path.name))
    _apply_policy(entries, policy)
    return entries


def newest_complete(run_dir: Path) -> tuple[Path, list[str]]:
    """Return the newest complete checkpoint of a run, and a line for each incomplete one, which might be newer.

    Only the sizes of files are checked. Raises ConfigError if no checkpoint is complete.
    """
    entries = list_checkpoints(run_dir, CheckpointConfig())
    incomplete = [f"checkpoint {each.path} is skipped: {'; '.join(each.problems)}" for each in entries if each.problems]
    complete = [each.path for each in entries if not each.problems]
    if not complete:
        found = f"; {'; '.join(incomplete)}" if incomplete else ""
        raise ConfigError(
            f"{run_dir}: no complete checkpoint in {CHECKPOINTS}/{found}; wait for the run's first save, or give "
            "another run"
        )
    return complete[-1], incomplete


def reasons_to_keep(complete: Sequence[Manifest], policy: CheckpointConfig) -> list[list[str]]:
    """Return the reasons to keep each complete checkpoint of a run, in the given order; empty: it may be removed.

    The newest checkpoint is always kept. An ephemeral one (checkpoint.every_minutes) is kept for no other reason, and
    does not count towards `policy.keep`. Of equal held-out losses the earliest checkpoint is the best.
    """
    permanent = sorted((manifest for manifest in complete if not manifest.ephemeral), key=lambda m: -m.serial)
    newest = max((manifest.serial for manifest in complete), default=0)
    last = {manifest.serial for manifest in permanent[: policy.keep]}
    scored = [(manifest.eval_loss, manifest.serial) for manifest in permanent if manifest.eval_loss is not None]
    best = min(scored)[1] if scored and policy.keep_best else None

    def reasons(manifest: Manifest) -> list[str]:
        eligible = policy.keep_every > 0 and not manifest.ephemeral
        conditions = {
            "newest": manifest.serial == newest,
            f"last {policy.keep}": manifest.serial in last,
            f"every {policy.keep_every}": eligible and manifest.step % policy.keep_every == 0,
            "best": manifest.serial == best,
        }
        return [reason for reason, holds in conditions.items() if holds]

    return [reasons(manifest) for manifest in complete]


def _apply_policy(entries: list[ListedCheckpoint], policy: CheckpointConfig) -> None:
    """Set `reasons` of each entry; only complete checkpoints count."""
    complete = [(entry, entry.manifest) for entry in entries if entry.manifest and not entry.problems]
    reasons = reasons_to_keep([manifest for _, manifest in complete], policy)
    for entry in entries:
        entry.reasons = []
    for (entry, _), why in zip(complete, reasons, strict=True):
        entry.reasons = why


def check_contents(entry: ListedCheckpoint) -> list[str]:
    """Compare every block of a checkpoint with its hash; store the problems in the entry and return them."""
    if entry.manifest and not entry.problems:
        try:
            entry.problems = entry.manifest.check_hashes(entry.path, rank=0, world=1)
        except OSError as error:
            entry.problems = [f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"]
    return entry.problems


def removable(run_dir: Path, policy: CheckpointConfig) -> tuple[list[ListedCheckpoint], list[Path]]:
    """Return the complete checkpoints that `policy` does not keep, and the leftovers of killed attempts.

    The newest checkpoint is verified block by block before the policy is applied. A damaged one is not counted, and the
    one before it is verified as the newest.
    """
    entries = list_checkpoints(run_dir, policy)
    for entry in reversed(entries):
        if entry.manifest and not check_contents(entry):
            break
    _apply_policy(entries, policy)
    return [e for e in entries if not e.problems and not e.reasons], unfinished_checkpoints(run_dir / CHECKPOINTS)


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints and the leftovers of killed attempts.

    Each folder is renamed first: a removal that is killed leaves no incomplete checkpoint under a published name, and
    the next removal deletes the rest. Files that no save wrote are kept, in a folder step_N.others.
    """
    renamed = []
    for path in paths:
        if TEMPORARY not in path.name:
            path = path.rename(path.with_name(temporary_name(path.name)))
        renamed.append(path)
    for path in renamed:
        fault_point("while_pruning")
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif manifest := _manifest_with_strangers(path):
            # The manifest last: the next removal needs it if this one is killed.
            for name in (*manifest.files, CHECKPOINT_MANIFEST):
                (path / name).unlink(missing_ok=True)
            kept, again = path.with_name(f"{path.name.partition(TEMPORARY)[0]}.others"), 1
            while os.path.lexists(kept):
                again += 1
                kept = kept.with_suffix(f".others-{again}")
            path.rename(kept)
            logger.warning("%s: kept what is not of the removed checkpoint: %s", kept, shown_names(os.listdir(kept)))
        else:
            shutil.rmtree(path)


def _manifest_with_strangers(path: Path) -> Manifest | None:
    """Return the manifest of a folder that also holds other files than those of the checkpoint; None otherwise."""
    try:
        manifest = Manifest.read(path)
    except ManifestError:
        return None
    return manifest if manifest.strangers(path) else None


def _entry(path: Path) -> ListedCheckpoint:
    try:
        manifest = Manifest.read(path)
    except ManifestError as error:
        return ListedCheckpoint(path, None, [str(error)], [])
    return ListedCheckpoint(path, manifest, manifest.check_sizes(path), [])
