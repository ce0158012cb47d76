"""Names under `run_dir/checkpoints`."""

from __future__ import annotations

import re
from pathlib import Path

from components.checkpoint.manifest import Manifest, ManifestError

FOLDER = "checkpoints"
STATE = "state.json"
FROZEN = "frozen"
"""In the state: the fingerprint of the weights that are not trained, and not saved."""
TEMPORARY = ".tmp-"
PUBLISHED = re.compile(r"step_\d+(\.\d+)?")
"""step_40, or step_40.1 for a step that was saved a second time."""


def random_file(rank: int) -> str:
    """Name of the file with a rank's random state."""
    return f"random-{rank:05}.json"


def published(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints of a folder whose manifest is there and whole."""
    found = []
    for path in candidates(folder):
        try:
            found.append((path, Manifest.read(path)))
        except ManifestError:
            continue
    return found


def leftovers(folder: Path) -> list[Path]:
    """Return what attempts that were killed left behind, while they wrote or while they removed."""
    return sorted(folder.glob(f"*{TEMPORARY}*"))


def candidates(folder: Path) -> list[Path]:
    """Return what has the name of a published checkpoint; what is no folder is reported when its manifest is read."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PUBLISHED.fullmatch(path.name))
