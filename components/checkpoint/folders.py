"""Names of the folders and files in `run_dir/checkpoints`."""

from __future__ import annotations

import re
from pathlib import Path

from components.checkpoint.manifest import Manifest, ManifestError

FOLDER = "checkpoints"
STATE = "state.json"
BASE_FINGERPRINT = "frozen"
"""Key in state.json of the fingerprint of a LoRA run's base weights, which are neither trained nor saved."""
TEMPORARY = ".tmp-"
"""Part of the name of a folder that is being written or removed."""
PUBLISHED = re.compile(r"step_[0-9]{1,18}(\.[0-9]{1,9})?")
"""step_40, or step_40.1 for a step that was saved a second time."""
_LEFTOVER = re.compile(f"{PUBLISHED.pattern}{re.escape(TEMPORARY)}[0-9a-f]+")


def random_file(rank: int) -> str:
    """Return the name of the file with the random state of `rank`."""
    return f"random-{rank:05}.json"


def published(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of a folder that have a valid manifest; the files it lists are not checked."""
    found = []
    for path in candidates(folder):
        try:
            found.append((path, Manifest.read(path)))
        except ManifestError:
            continue
    return found


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders of saves and removals that were killed."""
    return sorted(path for path in folder.glob(f"*{TEMPORARY}*") if _LEFTOVER.fullmatch(path.name))


def candidates(folder: Path) -> list[Path]:
    """Return the paths that are named like a published checkpoint; Manifest.read rejects those that are not one."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PUBLISHED.fullmatch(path.name))
