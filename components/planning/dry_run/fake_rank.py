"""A rank without peers and without memory: fake process group, fake tensors.

The only file of the dry run that uses private parts of torch; tests/unit/test_fake_rank.py names each that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

GROUPED_MM = torch.ops.aten._grouped_mm.default
EMPTY = torch.ops.aten.empty.memory_format
PROPAGATION = "_propagate_tensor_meta_non_cached"
"""Method of DTensor that finds the shape of an operator's output by running it on fake tensors of the global shape."""


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

    def __init__(self, *, plays_gpu: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.plays_gpu = plays_gpu
        """Whether the tensors, which are on the CPU, stand for those of a GPU."""
        self.allocates_fakes = False
        """Whether new tensors on the CPU are fake. False until the first step: what is built before, the host
        computes with values."""

        self._runs_parts = False
        """Whether torch runs the operators that one on fake tensors consists of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._is_fake(tensors, kwargs) and not self._is_read_in_c(func, args, kwargs):
            if func is GROUPED_MM:
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
        return func is EMPTY and not self._runs_parts and len(args[0]) == 1 and kwargs.get("dtype") == torch.int32

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
def outside_of_shape_propagation(silent: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `silent` whenever DTensor propagates shapes within this context."""
    original = getattr(ShardingPropagator, PROPAGATION)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with silent():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, PROPAGATION, propagate)
    try:
        yield
    finally:
        setattr(ShardingPropagator, PROPAGATION, original)
