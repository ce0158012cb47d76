"""Bytes of the storages that exist on this rank, followed operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.planning.dry_run.fake_rank import outside_of_shape_propagation
from components.planning.dry_run.storages import id_of, storages

RESIZES = ("fsdp::", "inductor::", "c10d::", "_c10d_functional::")
"""Namespaces of the operators after which all sizes are read again: FSDP2 frees and allocates its gathered parameters
by resizing their storages, which is not an operator."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Highest sum of the bytes of all storages."""

    bytes: int = 0
    operator: str = ""
    """Operator that allocated the last bytes, such as `aten::mm`."""
    phase: str = ""
    """Phase that the operator ran in, see `StorageTracker.phase`."""


def gloo_copy_bytes(operator: str, args: tuple[Any, ...], output: Any) -> int:
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
        """`with_gloo_copies`: Add the buffers that the backend of CPU ranks allocates, see `gloo_copy_bytes`."""
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
                self._left_out.add(id_of(storage))
                self._set(id_of(storage), 0)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Count no storages that are allocated within the context."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    def __enter__(self) -> StorageTracker:
        self._propagation = outside_of_shape_propagation(self.silent)
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
        if name.startswith(RESIZES):
            self._read_sizes()
        copied = gloo_copy_bytes(name, args, output) if self._with_gloo_copies else 0
        if self._bytes + copied > self.peak.bytes:
            self._read_sizes()  # resized storages may have been freed since
            if self._bytes + copied > self.peak.bytes:
                self.peak = Peak(self._bytes + copied, name, self.phase())
        return output

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = id_of(storage)
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
