"""Collectives on JSON values, with or without a process group.

The object collectives of torch.distributed unpickle data from peers, which lets any process that joins the group run
code on the others. Meshbook's own messages consist of numbers, strings, lists and dicts, which JSON covers.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def this_rank() -> int:
    """Return the global rank; 0 without a process group, whatever the environment contains."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group, whatever the environment contains."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a value over `group`, and return the values in rank order as decoded from JSON (tuples become lists).

    Without a process group, return the value of this process. Raises TypeError for a value that JSON cannot encode.
    """
    text = json.dumps(value)
    if not dist.is_initialized():
        return [json.loads(text)]
    mine = _as_tensor(text, group)  # (bytes,)
    size = torch.tensor([mine.numel()], device=mine.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in torch.cat(sizes).tolist()]
    padded = mine.new_zeros(max(lengths))
    padded[: mine.numel()] = mine
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [_from_tensor(each[:length]) for each, length in zip(texts, lengths, strict=True)]


def broadcast_json(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast a value over `group`, and return it as decoded from JSON.

    Args:
        src: Rank within `group` of the sender; the values of the others are ignored.
    """
    if not dist.is_initialized():
        return json.loads(json.dumps(value))
    root = dist.get_rank(group) == src
    mine = _as_tensor(json.dumps(value) if root else "", group)
    size = torch.tensor([mine.numel()], device=mine.device)
    dist.broadcast(size, group=group, group_src=src)
    text = mine if root else mine.new_empty(int(size.item()))
    dist.broadcast(text, group=group, group_src=src)
    return _from_tensor(text)


def _as_tensor(text: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the bytes of a text as a uint8 tensor on a device that the group's backend supports."""
    backend = str(dist.get_backend(group))
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy()).to(device)


def _from_tensor(text: torch.Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
