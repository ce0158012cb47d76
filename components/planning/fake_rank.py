"""A rank without peers and without memory: fake process group, fake tensors, and the bytes that they would take.

The only file of the simulation that uses private parts of torch; tests/unit/test_fake_rank.py names each that is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_GROUPED_MM = torch.ops.aten._grouped_mm.default
_EMPTY = torch.ops.aten.empty.memory_format
_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""Method of DTensor that finds the shape of an operator's output by running it on fake tensors of the global shape."""
_RESIZES = ("fsdp::", "inductor::", "c10d::", "_c10d_functional::")
"""Namespaces of the operators after which all sizes are read again: FSDP2 frees and allocates its gathered parameters
by resizing their storages, which is not an operator."""


@contextmanager
def fake_process_group(rank: int, world: int) -> Iterator[None]:
    """Make this process rank `rank` of `world` within the context; collectives return at once and move no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeRank(FakeTensorMode):
    """Tensor mode in which the tensors of a rank have shapes and sizes but no memory and no values.

    Tensors on the meta device stay as they are, so that models are built as in a run: its `materialize` makes fake
    tensors of them. Operators whose inputs all have values run normally, such as those on the ranks of a mesh.
    """

    def __init__(self, *, as_cuda: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.as_cuda = as_cuda
        """Whether fake tensors on the CPU are reported as CUDA tensors."""
        self.allocates_fakes = False
        """Whether new tensors on the CPU are fake. False until the first step: what is built before, the host
        computes with values."""

        self._runs_parts = False
        """Whether a composite operator is being decomposed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._is_fake(tensors, kwargs) and not self._is_read_in_c(func, args, kwargs):
            if func is _GROUPED_MM:
                return _grouped_mm(*args, **kwargs)
            outer, self._runs_parts = self._runs_parts, True
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._runs_parts = outer
        return func(*args, **kwargs)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake copy of a tensor."""
        return self.from_tensor(tensor)

    def _is_read_in_c(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator allocates a tensor of DDP's reducer, which reads the order of its buckets."""
        return func is _EMPTY and not self._runs_parts and len(args[0]) == 1 and kwargs.get("dtype") == torch.int32

    def _is_fake(self, tensors: list[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return True
        device = kwargs.get("device")
        target = None if device is None else torch.device(device).type
        if tensors:
            return all(tensor.is_meta for tensor in tensors) and target not in (None, "meta")  # memory for a meta model
        return (self.allocates_fakes or self._runs_parts) and target != "meta"


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result of a matmul per expert: torch's operator on fake tensors accepts bfloat16 only.

    Args:
        left: (rows, inner), or (experts, rows, inner).
        right: (experts, inner, columns), or (inner, columns).
        ends: End of each expert's part of the dim that is not batched, (experts,).
    """
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        shape = (len(left) if left.dim() == 3 or ends is None else len(ends), *shape)
    return left.new_empty(shape, dtype=dtype or left.dtype)


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _outside_of_shape_propagation(silent: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `silent` whenever DTensor propagates shapes within this context."""
    original = getattr(ShardingPropagator, _PROPAGATION)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with silent():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, _PROPAGATION, propagate)
    try:
        yield
    finally:
        setattr(ShardingPropagator, _PROPAGATION, original)


@dataclass(frozen=True, slots=True)
class Peak:
    """Highest sum of the bytes of all storages."""

    bytes: int = 0
    operator: str = ""
    """Operator that allocated the last bytes, such as `aten::mm`."""
    phase: str = ""
    """Phase that the operator ran in, see `StorageTracker.phase`."""


def _gloo_copy_bytes(operator: str, args: tuple[Any, ...], output: Any) -> int:
    """Return the bytes of the buffer that gloo allocates within a collective, and frees when it is done.

    torch's gloo backend gathers into a flat copy of the output, and implements a reduce-scatter as an all-reduce of a
    copy of the input. NCCL works on the tensors themselves.
    """
    space, _, name = operator.partition("::")
    name = name.replace("_", "")
    if space not in ("c10d", "_c10d_functional"):
        return 0
    if name.startswith("allgather"):
        copied = args[0] if space == "c10d" else output
    elif name.startswith("reducescatter"):
        copied = args[1] if space == "c10d" else args[0]
    else:
        return 0
    return sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(copied) if isinstance(leaf, torch.Tensor))


class StorageTracker(TorchDispatchMode):
    """Dispatch mode that sums up the bytes of all storages on one type of device while they exist.

    It refers to storages weakly, so that it does not prolong their lives. Storages that existed before are counted
    from the first operator that returns them. Inside of DTensor's shape propagation nothing is counted:
    it runs operators on fake tensors of the global shape, which no rank allocates.
    """

    def __init__(self, *, with_gloo_copies: bool = False, device_type: str = "cpu") -> None:
        """`with_gloo_copies`: Add the buffers that the backend of CPU ranks allocates, see `_gloo_copy_bytes`."""
        super().__init__()
        self._device_type = device_type
        self._with_gloo_copies = with_gloo_copies
        self.phase: Callable[[], str] = str
        """Returns the name of the current part of the step, for `Peak.phase`."""
        self.peak = Peak()
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes = 0
        self._is_silent = False
        self._left_out: set[int] = set()

    @property
    def bytes(self) -> int:
        """Bytes of all storages at this moment."""
        self._read_sizes()
        return self._bytes

    def restart(self) -> None:
        """Forget the peak, and start from the storages that exist now."""
        self.peak = Peak(self.bytes, "", self.phase())

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors no longer: they are in the host's memory."""
        for tensor in tensors:
            for storage in storages(tensor):
                self._left_out.add(_id_of(storage))
                self._set(_id_of(storage), 0)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Count no storages that are allocated within the context."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    def __enter__(self) -> StorageTracker:
        self._propagation = _outside_of_shape_propagation(self.silent)
        self._propagation.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._propagation.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs first; its operators on local tensors are dispatched here again
        output = func(*args, **(kwargs or {}))
        if self._is_silent:
            return output
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        name = func.name()
        if name.startswith(_RESIZES):
            self._read_sizes()
        copied = _gloo_copy_bytes(name, args, output) if self._with_gloo_copies else 0
        if self._bytes + copied > self.peak.bytes:
            self._read_sizes()  # resized storages may have been freed since
            if self._bytes + copied > self.peak.bytes:
                self.peak = Peak(self._bytes + copied, name, self.phase())
        return output

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = _id_of(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._remove(key))
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        size = 0 if key in self._left_out else size
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _remove(self, key: int) -> None:
        del self._storages[key]
        self._bytes -= self._sizes.pop(key)

    def _read_sizes(self) -> None:
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is not None:
                self._set(key, storage.nbytes())


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank; a storage shared by several tensors counts once."""
    return sum({_id_of(storage): storage.nbytes() for tensor in tensors for storage in storages(tensor)}.values())


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor on this rank: for a DTensor or another wrapper, those of its inner tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [storage for each in inner if isinstance(each, torch.Tensor) for storage in storages(each)]


def _id_of(storage: torch.UntypedStorage) -> int:
    """Return an id that is unique among live storages.

    torch has no public one: `data_ptr()` is 0 for all empty storages. `_cdata` is the address of the C++ object.
    """
    return storage._cdata


def parameters_in_use(model: nn.Module, head: nn.Module | None) -> list[torch.Tensor]:
    """Return the parameters that a forward uses: under FSDP2 the all-gathered ones while a layer is unsharded."""
    modules = [*model.modules(), *([] if head is None else [head])]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


class SavedForBackward:
    """Context that measures the tensors that autograd saves for the backward."""

    def __init__(self, parameters: Callable[[], list[torch.Tensor]]) -> None:
        self.peak = 0
        """Peak bytes of saved tensors, without parameters and their views."""
        self._parameters = parameters
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        parameters: set[int] | None = None
        for storage in storages(tensor):
            key = _id_of(storage)
            if key in self._kept:
                continue
            if parameters is None:
                parameters = {_id_of(each) for parameter in self._parameters() for each in storages(parameter)}
            if key not in parameters:
                self._kept[key] = storage.nbytes()
                weakref.finalize(storage, self._kept.pop, key)
        self.peak = max(self.peak, sum(self._kept.values()))
        return tensor
