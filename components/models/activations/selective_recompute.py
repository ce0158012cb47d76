"""Selective activation checkpointing of decoder layers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

SAVED_OPERATORS = (
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
uncompiled layer. torch dispatches such regions as one operator after `wrap_compiled_regions`.
"""


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the forward and recompute contexts for a `checkpoint` that saves the outputs of `SAVED_OPERATORS`.

    torch's `create_selective_checkpoint_contexts` is not used, for two reasons. It saves aliases, whose version
    counters are not always shared with the original (a linear layer returns an `_unsafe_view` of its matmul), so a
    layer that modifies such an output in place would be recomputed from the modified values. It also requires that the
    forward ran every operator of the recomputation, which FSDP's hooks around a nested unit violate.
    """
    outputs = _SavedOutputs()
    return _SaveOutputs(outputs), _ReuseOutputs(outputs)


def wrap_compiled_regions() -> None:
    """Make code that is compiled from now on visible to `selective_contexts` as one operator; for flex attention.

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
        return f"higher_order::{operator.name()}" in SAVED_OPERATORS
    if schema.name not in SAVED_OPERATORS or schema.is_mutable:
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
    yield from zip((each.name for each in schema.arguments), args, strict=False)
    yield from kwargs.items()


def _written_tensors(operator: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call modifies in place."""
    schema = _schema(operator)
    if schema is None or not schema.is_mutable:
        return
    written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
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
    """Dispatch mode of the forward: saves outputs of `SAVED_OPERATORS`, and copies one before it is modified."""

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
