"""What the checkpoints of a run directory are, and what is wrong with them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from components.checkpoint.folders import FOLDER, candidates, leftovers
from components.checkpoint.manifest import Manifest, ManifestError
from components.checkpoint.retention import reasons_to_keep
from components.config.schema.checkpoint import CheckpointConfig


@dataclass(slots=True)
class Entry:
    """One folder with the name of a checkpoint."""

    path: Path
    manifest: Manifest | None
    """None where it is missing or damaged."""
    problems: list[str]
    """What is wrong with it; nothing: complete."""
    reasons: list[str]
    """Why it stays. Nothing: it is not complete, so that nobody removes it, or it may go."""


def list_checkpoints(run_dir: Path, policy: CheckpointConfig) -> list[Entry]:
    """Return what has the name of a checkpoint, the oldest first; files are compared by their sizes alone."""
    entries = [_look(path) for path in candidates(run_dir / FOLDER)]
    entries.sort(key=lambda entry: (entry.manifest.serial if entry.manifest else 0, entry.path.name))
    judge(entries, policy)
    return entries


def judge(entries: list[Entry], policy: CheckpointConfig) -> None:
    """Set `reasons` of each entry: only complete ones are counted."""
    complete = [(entry, entry.manifest) for entry in entries if entry.manifest and not entry.problems]
    reasons = reasons_to_keep([manifest for _, manifest in complete], policy)
    for entry in entries:
        entry.reasons = []
    for (entry, _), why in zip(complete, reasons, strict=True):
        entry.reasons = why


def check_contents(entry: Entry) -> list[str]:
    """Compare every block of a checkpoint with its hash, and return (and remember) its problems by file name."""
    if entry.manifest and not entry.problems:
        entry.problems = entry.manifest.check_hashes(entry.path, rank=0, world=1)
    return entry.problems


def removable(run_dir: Path, policy: CheckpointConfig) -> tuple[list[Entry], list[Path]]:
    """Return the complete checkpoints that `policy` does not keep, and what killed attempts left.

    The newest one that is kept has been verified, block by block: one that is damaged counts for nothing, and the one
    before it is the newest.
    """
    entries = list_checkpoints(run_dir, policy)
    for entry in reversed(entries):
        if entry.manifest and not check_contents(entry):
            break
    judge(entries, policy)
    return [e for e in entries if not e.problems and not e.reasons], leftovers(run_dir / FOLDER)


def _look(path: Path) -> Entry:
    try:
        manifest = Manifest.read(path)
    except ManifestError as error:
        return Entry(path, None, [str(error)], [])
    return Entry(path, manifest, manifest.check_sizes(path), [])
