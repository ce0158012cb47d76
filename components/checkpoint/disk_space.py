"""Required and free bytes, for the error about a checkpoint that could not be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from components.checkpoint.tensors import Tensors, merge_over_ranks
from components.exchange import broadcast_json


def write_failure(tmp: Path, tensors: Tensors, group: dist.ProcessGroup | None = None) -> str:
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
