"""Bytes of tensors on this rank, and of those that autograd saves for the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank; a storage shared by several tensors counts once."""
    return sum({id_of(storage): storage.nbytes() for tensor in tensors for storage in storages(tensor)}.values())


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor on this rank: for a DTensor or another wrapper, those of its inner tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [storage for each in inner if isinstance(each, torch.Tensor) for storage in storages(each)]


def id_of(storage: torch.UntypedStorage) -> int:
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
            key = id_of(storage)
            if key in self._kept:
                continue
            if parameters is None:
                parameters = {id_of(each) for parameter in self._parameters() for each in storages(parameter)}
            if key not in parameters:
                self._kept[key] = storage.nbytes()
                weakref.finalize(storage, self._kept.pop, key)
        self.peak = max(self.peak, sum(self._kept.values()))
        return tensor
