"""Values that ranks exchange as JSON, with a process group or without.

`torch.distributed`'s object collectives unpickle what a peer sends, and so run any code that whoever joined the process
group puts into it. Meshbook's own values are numbers, texts, lists and dicts, for which JSON does.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of `group` in rank order, as they come back from JSON (tuples as lists).

    Without a process group there is one rank. Raises TypeError for a value that JSON does not have.
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
    """Return on every rank of `group` the value of one, as it comes back from JSON.

    Args:
        src: Rank within `group` whose value it is; the others' is ignored.
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
    """The bytes of a text, on a device that the group moves tensors from."""
    backend = str(dist.get_backend(group))
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _from_tensor(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
