"""Device types that a backend of torch.distributed supports."""

from __future__ import annotations

import torch
import torch.distributed as dist

_CPU_ONLY = {"gloo", "mpi"}  # torch lists CUDA for them, but most of their collectives reject CUDA tensors


def device_backends(backend: str) -> dict[str, str]:
    """Return device type -> backend for a name such as nccl or a list such as cpu:gloo,cuda:nccl.

    Raises ValueError for a name that is not registered with torch.
    """
    if backend == dist.Backend.UNDEFINED:  # initialized without a name: torch chooses by the tensor's device
        return dict(dist.Backend.default_device_backend_map)
    if ":" in backend:
        return dict(entry.split(":", 1) for entry in backend.lower().split(","))
    name = backend.lower()
    capability = dist.Backend.backend_capability.get(name)
    if capability is None:
        raise ValueError(f"backend={backend}: must be one of {', '.join(dist.Backend.backend_capability)}")
    return {device: name for device in capability if not (name in _CPU_ONLY and device != "cpu")}


def backend_supports_cuda(backend: str | None = None) -> bool:
    """Return whether a backend supports CUDA tensors (OLMo-core, distributed/utils.py).

    None: the backend of the running process group; without one, return whether CUDA is available.
    """
    if backend is None and not dist.is_initialized():
        return torch.cuda.is_available()
    return "cuda" in device_backends(backend or str(dist.get_backend()))


def backend_supports_cpu(backend: str | None = None) -> bool:
    """Return whether a backend supports CPU tensors (OLMo-core, distributed/utils.py).

    None: the backend of the running process group; without one, return True.
    """
    if backend is None and not dist.is_initialized():
        return True
    return "cpu" in device_backends(backend or str(dist.get_backend()))


def provides(backend: str, requested: str) -> bool:
    """Return whether `backend` has every device-backend pair of `requested`: cpu:gloo,cuda:nccl provides nccl."""
    provided = device_backends(backend)
    return all(provided.get(device) == name for device, name in device_backends(requested).items())
