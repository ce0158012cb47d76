"""Activations that decoder layers save for the backward: recomputed, or offloaded to host memory.

Activation checkpointing saves less in the forward, and recomputes the rest. Offload keeps what is saved in pinned host
memory: each layer's saved tensors are copied to the host on a side stream while the next layer computes, and released
after that. In the backward, the first use of a layer's tensors starts the copies of the layer before it, so that they
overlap with computation. The device holds the saved tensors of about two layers. The last layer keeps its own, because
its backward comes next.

Parameters, buffers and what all layers share (rotary embeddings, masks) stay on the device. Under autocast, casts of
weights are saved tensors like others.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from components.config.schema.parallelism import ActivationCheckpointing
from components.models.anatomy import Anatomy
from components.models.layers import decoder_layers, has_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SMALLEST = 2**16
"""Tensors of fewer bytes stay on the device: a copy of them takes longer to start than to run."""
_SAVED_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "higher_order::flex_attention",
    "higher_order::inductor_compiled_code",
)
"""Operators whose outputs are saved under `selective`: matmuls and attention. Everything else is cheap to recompute.

`inductor_compiled_code` is flex attention, which transformers compiles itself: it is the only compiled region inside an
uncompiled layer. torch dispatches such regions as one operator after `_wrap_compiled_regions`.
"""


def checkpoint_activations(
    model: PreTrainedModel, policy: ActivationCheckpointing, anatomy: Anatomy | None = None
) -> None:
    """Apply activation checkpointing to decoder layers in place: save less in the forward, recompute in the backward.

    Policies: full saves only each layer's input (a third more FLOPs); alternate does so for every other layer of the
    model; selective also saves the outputs of matmuls and attention, so that only cheap operators are recomputed.
    Parameter names do not change, because only forwards are replaced. The recomputation runs inside FSDP's hooks, where
    the layer's parameters are unsharded anyway.

    Raises ValueError for `auto`, which must be resolved to another policy first.
    """
    if policy == ActivationCheckpointing.auto:
        raise ValueError("parallelism.activation_checkpointing=auto: resolve it with choose_recompute_policy first")
    if policy == ActivationCheckpointing.none:
        return
    if policy == ActivationCheckpointing.selective and model.config._attn_implementation == "flex_attention":
        _wrap_compiled_regions()
    options: dict[str, Any] = {"context_fn": _selective_contexts} if policy == ActivationCheckpointing.selective else {}
    layers = decoder_layers(model, anatomy)[:: 1 + (policy == ActivationCheckpointing.alternate)]
    for layer in filter(has_parameters, layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


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
        self._tensors: list[weakref.ref[_OffloadedTensor]] = []
        self._sources: dict[Any, tuple[torch.Tensor, _OffloadedTensor]] = {}
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
            saved = _OffloadedTensor(self, host, tensor)
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


class _OffloadedTensor:
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
    return saved.get() if isinstance(saved, _OffloadedTensor) else saved


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


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the forward and recompute contexts for a `checkpoint` that saves the outputs of `_SAVED_OPERATORS`.

    torch's `create_selective_checkpoint_contexts` is not used, for two reasons. It saves aliases, whose version
    counters are not always shared with the original (a linear layer returns an `_unsafe_view` of its matmul), so a
    layer that modifies such an output in place would be recomputed from the modified values. It also requires that the
    forward ran every operator of the recomputation, which FSDP's hooks around a nested unit violate.
    """
    outputs = _SavedOutputs()
    return _SaveOutputs(outputs), _ReuseOutputs(outputs)


def _wrap_compiled_regions() -> None:
    """Make code that is compiled from now on visible to `_selective_contexts` as one operator; for flex attention.

    This is a process-wide setting, because transformers compiles flex attention itself at its first call.
    """
    from torch._inductor import config

    config.wrap_inductor_compiled_regions = True


def _is_saved(operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the output of this call is saved.

    Attention with dropout is not saved: skipping it in the recomputation would shift the random numbers of later
    dropouts.
    """
    schema = _schema(operator)
    if schema is None:
        return f"higher_order::{operator.name()}" in _SAVED_OPERATORS
    if schema.name not in _SAVED_OPERATORS or schema.is_mutable:
        return False
    return not next((value for name, value in _arguments(schema, args, kwargs) if name == "dropout_p"), 0.0)


def _schema(operator: Any) -> Any:
    """Return an operator's schema; None for a higher-order operator."""
    return operator._schema if isinstance(operator, OpOverload) else None


def _queue_of(operator: Any, args: Any) -> Any:
    """Return the key of the queue for a call's outputs: one per operator, and one per compiled region."""
    region = args[0] if args and not isinstance(args[0], torch.Tensor) else None
    return (operator, region) if isinstance(operator, HigherOrderOperator) else operator


def _arguments(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each argument that was passed in a call."""
    yield from zip((argument.name for argument in schema.arguments), args, strict=False)
    yield from kwargs.items()


def _written_tensors(operator: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call modifies in place."""
    schema = _schema(operator)
    if schema is None or not schema.is_mutable:
        return
    written = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    for name, value in _arguments(schema, args, kwargs):
        if name in written:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storages(tensor: torch.Tensor) -> list[int]:
    """Return the address of the storage of a tensor, or of each inner tensor of a subclass such as DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()._cdata]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # DTensor also lists its mesh
    return [storage for each in inner if isinstance(each, torch.Tensor) for storage in _storages(each)]


class _SavedTensor:
    """A tensor saved in the forward for the recomputation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detach below autograd's in-place tracking, to share the version counter without holding the graph.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = tensor.detach()
        self._version = self._tensor._version

    def copy(self) -> None:
        """Replace the tensor with a copy that does not share memory with the forward."""
        self.check()
        self._tensor = self._tensor.clone()
        self._version = self._tensor._version

    def take(self) -> torch.Tensor:
        """Return the tensor, which is unchanged since the forward."""
        self.check()
        return self._tensor

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place by an operation that torch did not dispatch."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "a kernel outside torch's dispatcher modified the output of a matmul or of attention in place, so "
                "parallelism.activation_checkpointing=selective would give wrong gradients; set it to full or none"
            )


class _SavedOutputs:
    """Outputs of one forward of a layer, in one queue per operator, in call order."""

    def __init__(self) -> None:
        self.queues: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self.by_storage: defaultdict[int, list[_SavedTensor]] = defaultdict(list)

    def save(self, queue: Any, output: Any) -> None:
        """Append the output of a call to its queue."""
        self.queues[queue].append(tree_map_only(torch.Tensor, self._save_tensor, output))

    def copy_storage(self, storage: int) -> None:
        """Copy the saved tensors of a storage that is about to be modified."""
        for saved in self.by_storage.pop(storage, ()):
            saved.copy()

    def _save_tensor(self, tensor: torch.Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor)
        for storage in _storages(tensor):
            self.by_storage[storage].append(saved)
        return saved


class _OutputsMode(TorchDispatchMode):
    """Base of the dispatch modes around a layer's forward and its recomputation."""

    supports_higher_order_operators = True

    def __init__(self, outputs: _SavedOutputs) -> None:
        super().__init__()
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled functions inside the layer compiled."""
        return True


class _SaveOutputs(_OutputsMode):
    """Dispatch mode of the forward: saves outputs of `_SAVED_OPERATORS`, and copies one before it is modified."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._outputs.by_storage:
            for tensor in _written_tensors(func, args, kwargs):
                for storage in _storages(tensor):
                    self._outputs.copy_storage(storage)
        output = func(*args, **kwargs)
        if _is_saved(func, args, kwargs):
            self._outputs.save(_queue_of(func, args), output)
        return output

    def __exit__(self, *exception: Any) -> None:
        """Copy saved tensors whose storage is still referenced outside the layer: this mode cannot see later writes."""
        super().__exit__(*exception)
        probe = torch.empty(0)  # an unshared storage, to measure the references that the use count itself adds
        overhead = torch._C._storage_Use_Count(_storages(probe)[0]) - 1
        for storage, saved in list(self._outputs.by_storage.items()):
            if torch._C._storage_Use_Count(storage) > len(saved) + overhead:
                self._outputs.copy_storage(storage)
        self._outputs.by_storage.clear()


class _ReuseOutputs(_OutputsMode):
    """Dispatch mode of the recomputation: returns saved outputs and runs all other operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_saved(func, args, kwargs):
            return func(*args, **kwargs)
        queue = self._outputs.queues[_queue_of(func, args)]
        if not queue:
            raise RuntimeError(
                f"{func} ran more often in the recomputation of a layer than in its forward: the layer depends on "
                "state that changed in between, or its backward ran twice; set "
                "parallelism.activation_checkpointing=full"
            )
        return tree_map_only(_SavedTensor, _SavedTensor.take, queue.popleft())
