"""Which devices a backend of torch.distributed can move tensors of."""

from __future__ import annotations

import torch
import torch.distributed as dist

_PARTIAL = {"gloo", "mpi"}  # torch lists CUDA for them, but most of their collectives refuse CUDA tensors


def device_backends(backend: str) -> dict[str, str]:
    """Return device type -> backend, of a plain name such as nccl or a list such as cpu:gloo,cuda:nccl.

    Raises ValueError for a name that torch does not know.
    """
    if backend == dist.Backend.UNDEFINED:  # somebody initialised without a name: torch chooses by the tensor
        return dict(dist.Backend.default_device_backend_map)
    if ":" in backend:
        return dict(entry.split(":", 1) for entry in backend.lower().split(","))
    name = backend.lower()
    capability = dist.Backend.backend_capability.get(name)
    if capability is None:
        raise ValueError(f"backend={backend}: torch.distributed knows {', '.join(dist.Backend.backend_capability)}")
    return {device: name for device in capability if not (name in _PARTIAL and device != "cpu")}


def backend_supports_cuda(backend: str | None = None) -> bool:
    """Check if a distributed backend supports CUDA tensors (seed page 002, OLMo-core).

    Without a name: the running process group, or, where there is none, whether CUDA is there at all.
    """
    if backend is None and not dist.is_initialized():
        return torch.cuda.is_available()
    return "cuda" in device_backends(backend or str(dist.get_backend()))


def backend_supports_cpu(backend: str | None = None) -> bool:
    """Check if a distributed backend supports CPU tensors (seed page 002, OLMo-core).

    Without a name: the running process group; True where there is none.
    """
    if backend is None and not dist.is_initialized():
        return True
    return "cpu" in device_backends(backend or str(dist.get_backend()))


def provides(backend: str, asked: str) -> bool:
    """Whether a group on `backend` does all that `asked` names: cpu:gloo,cuda:nccl provides nccl."""
    running = device_backends(backend)
    return all(running.get(device) == name for device, name in device_backends(asked).items())
