"""The retention policy: the checkpoints to keep, and the removal of the others. Imports no torch."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from components.checkpoint.folders import TEMPORARY
from components.checkpoint.manifest import Manifest
from components.config.schema.checkpoint import CheckpointConfig
from components.resilience.faults import fault_point


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


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints and the leftovers of killed attempts.

    Each folder is renamed first: a removal that is killed leaves no incomplete checkpoint under a published name, and
    the next removal deletes the rest.
    """
    renamed = []
    for path in paths:
        if TEMPORARY not in path.name:
            path = path.rename(path.with_name(f"{path.name}{TEMPORARY}{secrets.token_hex(4)}"))
        renamed.append(path)
    for path in renamed:
        fault_point("while_pruning")
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
