"""Offload of activations: what decoder layers save for the backward waits in pinned host memory.

Each layer's saved tensors are copied to the host on a side stream while the next layer computes, and released after
that. In the backward, the first use of a layer's tensors starts the copies of the layer before it, so that they
overlap with computation. The device holds the saved tensors of about two layers. The last layer keeps its own, because
its backward comes next.

Parameters, buffers and what all layers share (rotary embeddings, masks) stay on the device. Under autocast, casts of
weights are saved tensors like others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from components.models.anatomy import Anatomy
from components.models.layers import decoder_layers, has_parameters

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

_SMALLEST = 2**16
"""Tensors of fewer bytes stay on the device: a copy of them takes longer to start than to run."""


def offload_activations(
    model: PreTrainedModel, device: torch.device, anatomy: Anatomy | None = None, smallest: int = _SMALLEST
) -> int:
    """Make all decoder layers but the last keep their saved tensors in host memory, in place; return their number.

    Call it after `checkpoint_activations`, whose recomputation is then inside, and after `compile_layers`.

    Args:
        device: Device of the activations. On a CPU the host's copies are ordinary copies, for tests.
        smallest: Least size in bytes of a tensor that is offloaded.
    """
    layers = list(filter(has_parameters, decoder_layers(model, anatomy)))
    offload = _Offload(device, smallest)
    for layer in layers[:-1]:
        layer.forward = partial(offload.run, layer, layer.forward)
    for layer in layers[-1:]:
        layer.forward = partial(offload.run_last, layer.forward)
    return max(0, len(layers) - 1)


class _Offload:
    """Offloading of one model: its side stream, and the layer whose copies to the host are not complete."""

    def __init__(self, device: torch.device, smallest: int) -> None:
        self.device, self.smallest = device, smallest
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copying: _SavedLayer | None = None

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer's forward, and copy what it saves to the host."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        shared = [*layer.parameters(), *layer.buffers(), *tree_leaves((args[1:], kwargs))]
        storages = {_storage(each) for each in shared if isinstance(each, torch.Tensor)}
        saved = _SavedLayer(self, storages, self._copying)
        with saved_tensors_hooks(saved.pack, _unpack):
            output = forward(*args, **kwargs)
        saved.copied = self.event()
        self._release()
        self._copying = saved
        return output

    def run_last(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the last layer's forward, and complete the copies of the layer before it."""
        output = forward(*args, **kwargs)
        self._release()
        return output

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context of the side stream, which first waits for what the current stream has to compute."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def event(self) -> Any:
        """Return an event after the copies so far; None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _release(self) -> None:
        """Release the device's copies of the previous layer; the current stream waits until the host has its own."""
        if self._copying is not None:
            self._copying.release()
            self._copying = None


class _SavedLayer:
    """Saved tensors of one forward of a layer."""

    def __init__(self, offload: _Offload, shared: set[int], previous: _SavedLayer | None) -> None:
        self.offload = offload
        self._shared = shared
        # Weak references: the graph owns the tensors, and a layer whose backward is complete is gone.
        self._previous = None if previous is None else weakref.ref(previous)
        self._tensors: list[weakref.ref[_SavedTensor]] = []
        self._sources: dict[Any, tuple[torch.Tensor, _SavedTensor]] = {}
        self.copied: Any = None
        """Event after the copies to the host."""
        self._fetched = False
        self._arrived: Any = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Start the copy of a tensor to the host; return what is saved in its place, or the tensor if it stays.

        A tensor that several operators save is copied once. The source is held until the copy is complete, since its
        memory could be used again before.
        """
        local = _local(tensor)
        if local is None or local.device != self.offload.device or _storage(local) in self._shared:
            return tensor
        size = local.numel() * local.element_size()
        if size < self.offload.smallest or size > local.untyped_storage().nbytes():  # an expanded tensor
            return tensor
        key = (_storage(local), local.storage_offset(), local.shape, local.stride(), local.dtype, type(tensor))
        if key not in self._sources:
            host = torch.empty_like(local, device="cpu", pin_memory=self.offload.stream is not None)
            with self.offload.side_stream():
                host.copy_(local, non_blocking=True)
            saved = _SavedTensor(self, host, tensor)
            self._tensors.append(weakref.ref(saved))
            self._sources[key] = (local, saved)
        return self._sources[key][1]

    def release(self) -> None:
        """Release the sources; the current stream waits until they are copied."""
        self.offload.wait(self.copied)
        self._sources.clear()

    def fetch(self) -> None:
        """Start the copies back to the device, once."""
        if self._fetched:
            return
        self._fetched = True
        alive = [saved for tensor in self._tensors if (saved := tensor()) is not None]
        for saved in alive:  # allocated on the current stream, which uses and frees them
            saved.on_device = torch.empty_like(saved.host, device=self.offload.device)
        with self.offload.side_stream():
            for saved in alive:
                saved.on_device.copy_(saved.host, non_blocking=True)
        self._arrived = self.offload.event()

    def use(self) -> None:
        """Make the tensors usable on the current stream, and start the copies of the layer before."""
        self.fetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.fetch()
        self.offload.wait(self._arrived)


class _SavedTensor:
    """A saved tensor in host memory."""

    def __init__(self, layer: _SavedLayer, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.layer, self.host = layer, host
        self.on_device: Any = None
        self._placement: Any = None
        if isinstance(tensor, DTensor):
            self._placement = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def get(self) -> torch.Tensor:
        """Return the tensor on the device."""
        self.layer.use()
        if self._placement is None:
            return self.on_device
        mesh, placements, shape, stride = self._placement
        with torch.no_grad():
            return DTensor.from_local(self.on_device, mesh, placements, run_check=False, shape=shape, stride=stride)


def _unpack(saved: Any) -> torch.Tensor:
    return saved.get() if isinstance(saved, _SavedTensor) else saved


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the plain tensor that holds this rank's values; None for a subclass of another kind."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.trigger_wait()
    return local if type(local) in (torch.Tensor, nn.Parameter) or _is_fake(local) else None


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _storage(tensor: torch.Tensor) -> int:
    """Return an identifier of the storage of a tensor or of a DTensor's shard."""
    local = _local(tensor)
    return id(tensor) if local is None else local.untyped_storage()._cdata
