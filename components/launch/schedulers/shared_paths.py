"""The paths that a config names, and whether other machines can access them."""

from __future__ import annotations

from pathlib import Path

from components.config.schema.checks import field_values
from components.config.schema.data import MixtureDataConfig
from components.config.schema.recipes import RecipeConfig, named_models

LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "squashfs", "fuse.snapfuse"}
"""Types of file systems that other machines cannot access, unless this one exports them."""


def named_paths(cfg: RecipeConfig) -> dict[str, str | None]:
    """Return the paths that a config names, by key; a model's may be a name on the hub."""
    sources = cfg.data.sources if isinstance(cfg.data, MixtureDataConfig) else {}
    return {
        "run.dir": cfg.run.dir or str(Path.cwd()),
        **named_models(cfg),
        "data.path": field_values(cfg.data).get("path"),
        **{f"data.sources.{name}.path": field_values(each).get("path") for name, each in sources.items()},
    }


def _mounts() -> dict[str, str]:
    """Return the file system type of each mount point."""
    table = Path("/proc/self/mounts")
    lines = table.read_text().splitlines() if table.exists() else []
    return {entry[1].replace("\\040", " "): entry[2] for entry in map(str.split, lines) if len(entry) > 2}


def file_system(path: Path) -> str | None:
    """Return the type of the file system that contains a path; None if unknown."""
    absolute, mounts = path.absolute(), _mounts()
    return next((mounts[str(folder)] for folder in (absolute, *absolute.parents) if str(folder) in mounts), None)
