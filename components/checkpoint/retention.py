"""Which checkpoints stay, and how the others go. Imports no torch."""

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
    """Return for each of the complete checkpoints of a run why it stays, in its order; nothing: it may go.

    The newest always stays, whatever it is. Those that were saved for the time that had passed stay for no other
    reason, and take nobody's place. Of equal losses the earlier checkpoint is the best.
    """
    lasting = sorted((manifest for manifest in complete if not manifest.ephemeral), key=lambda m: -m.serial)
    newest = max((manifest.serial for manifest in complete), default=0)
    last = {manifest.serial for manifest in lasting[: policy.keep]}
    scored = [(manifest.eval_loss, manifest.serial) for manifest in lasting if manifest.eval_loss is not None]
    best = min(scored)[1] if scored and policy.keep_best else None

    def reasons(manifest: Manifest) -> list[str]:
        lasts = not manifest.ephemeral
        told = {
            "newest": manifest.serial == newest,
            f"last {policy.keep}": manifest.serial in last,
            f"every {policy.keep_every}": lasts and policy.keep_every > 0 and manifest.step % policy.keep_every == 0,
            "best": manifest.serial == best,
        }
        return [reason for reason, holds in told.items() if holds]

    return [reasons(manifest) for manifest in complete]


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints, or what killed attempts left of them.

    Each is renamed first: a removal that is killed half-way leaves no broken checkpoint under a published name, and
    the next one finishes it.
    """
    aside = []
    for path in paths:
        if TEMPORARY not in path.name:
            path = path.rename(path.with_name(f"{path.name}{TEMPORARY}{secrets.token_hex(4)}"))
        aside.append(path)
    for path in aside:
        fault_point("while_pruning")
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
