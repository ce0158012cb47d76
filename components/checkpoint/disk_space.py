"""How much a checkpoint takes and how much room there is for it: told when it could not be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from components.checkpoint.tensors import Tensors, over_all_ranks
from components.exchange import broadcast_json


def not_written(tmp: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> str:
    """Return the beginning of the sentence about a checkpoint that could not be written. A collective of `group`.

    Bytes are those of all ranks' tensors; a file for each rank's random state comes on top. The room is what rank 0
    sees: what is free in the file system of `tmp`, and what the failed attempt holds of it.
    """
    sizes = over_all_ranks({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}, group)
    room = broadcast_json(_room(tmp), group=group)
    has = "" if room is None else f", {tmp.parent} has room for {room:,}"
    return f"checkpoint {tmp} could not be written (its tensors are {sum(sizes.values()):,} bytes{has})"


def _room(tmp: Path) -> int | None:
    """None where the disk does not even tell that."""
    there = next((folder for folder in (tmp, *tmp.parents) if folder.exists()), tmp)
    try:
        return shutil.disk_usage(there).free + sum(file.stat().st_blocks * 512 for file in tmp.glob("*"))
    except OSError:
        return None
