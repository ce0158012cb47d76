"""Recording of collectives: process group, number of calls, and bytes.

torch's CommDebugMode counts operators, but records neither process groups nor bytes, misses sends and receives, and
fails around compiled layers. Its handling of DTensors is adopted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.distributed.mesh import Mesh, Ranks, groups_of_mesh

_OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "recv",
    "send",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
"""Operation names in the table: an operator is listed under the first of these that its name contains."""

_RECORDED_STEP = 2
"""Step of a run that is recorded, from 1; the first step also runs one-time initialization."""


@dataclass(slots=True)
class _Volume:
    """Calls and bytes of one operation over one group."""

    calls: int = 0
    bytes: int = 0
    """Input bytes of this rank, see `record_traffic`."""


@dataclass(slots=True)
class Traffic:
    """Recorded operations."""

    volumes: dict[tuple[Ranks, str], _Volume] = field(default_factory=dict)
    """(global ranks of the group, operation) -> volume, in the order of the first call."""

    @property
    def groups(self) -> set[Ranks]:
        """Groups with at least one recorded operation."""
        return {group for group, _ in self.volumes}


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record every collective and point-to-point operation of this rank within the context, forward and backward.

    Covers the operators of torch.distributed (FSDP2, DDP, direct calls) and the functional ones (DTensor), on any
    backend, inside compiled layers too. Groups of one rank move no data and are left out.

    Bytes are those of this rank's input tensors: its shard for an all-gather, the full input for a reduce-scatter,
    all-reduce or all-to-all, the sent or received tensor for a send or receive. (nccl-tests counts the larger of input
    and output, which for an all-gather is ranks x this number.) The hops of a ring or tree algorithm are not counted.
    """
    recorder = _Recorder()
    with recorder:
        yield recorder.traffic


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Row of the traffic table: one operation over one group."""

    group: str
    """Axes or views of the mesh with this group, or its ranks."""
    purpose: str
    operation: str
    calls: int
    bytes: int
    """Input bytes of this rank, see `record_traffic`."""


class StepTraffic:
    """Recorder of a run's second optimizer step; passes the table to `show`, or does nothing if not enabled."""

    def __init__(self, mesh: Mesh, show: Callable[[list[TrafficRow]], None], *, enabled: bool) -> None:
        self._mesh, self._show, self._enabled = mesh, show, enabled
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one optimizer step within this context."""
        self._steps += 1
        if not self._enabled or self._steps != _RECORDED_STEP:
            yield
            return
        with record_traffic() as traffic:
            yield
        self._show(traffic_table(traffic, self._mesh))


def traffic_table(traffic: Traffic, mesh: Mesh) -> list[TrafficRow]:
    """Return the rows of a recording in the order of `groups_of_mesh`; groups outside the mesh come last."""
    mesh_groups = {each.ranks: each for each in groups_of_mesh(mesh)}
    order = [*mesh_groups, *(ranks for ranks in traffic.groups if ranks not in mesh_groups)]
    rows = []
    for (ranks, operation), volume in sorted(traffic.volumes.items(), key=lambda item: order.index(item[0][0])):
        axes = mesh_groups[ranks].axes if ranks in mesh_groups else f"ranks {', '.join(map(str, ranks))}"
        purpose = mesh_groups[ranks].purpose if ranks in mesh_groups else "not a group of the mesh"
        rows.append(TrafficRow(axes, purpose, operation, volume.calls, volume.bytes))
    return rows


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._arguments: dict[Any, tuple[int, list[int]] | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Disable the mode during compilation only; torch.compile otherwise fails under a dispatch mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs first; its collectives on local tensors are dispatched here again
        kwargs = kwargs or {}
        if func not in self._arguments:
            self._arguments[func] = _find_arguments(func)
        positions = self._arguments[func]
        if positions is not None:
            group, inputs = positions
            values = dict(enumerate(args)) | {
                index: kwargs[argument.name]
                for index, argument in enumerate(func._schema.arguments)
                if argument.name in kwargs
            }
            self._count(_operation(func), values[group], [values.get(index) for index in inputs])
        return func(*args, **kwargs)

    def _count(self, operation: str, handle: Any, inputs: list[Any]) -> None:
        ranks = _ranks(handle)
        if len(ranks) == 1:
            return
        volume = self.traffic.volumes.setdefault((ranks, operation), _Volume())
        volume.calls += 1
        if operation != "barrier":
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            volume.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _find_arguments(func: Any) -> tuple[int, list[int]] | None:
    """Return the positions of the group and the input tensors among an operator's arguments; None without a group.

    Arguments are found by name, so that no list of operators has to be maintained.
    """
    # Higher-order operators have no schema.
    names = [argument.name for argument in func._schema.arguments] if isinstance(func, OpOverload) else []
    groups = [index for index, name in enumerate(names) if name in ("process_group", "group_name")]
    if not groups:
        return None
    return groups[0], [index for index, name in enumerate(names) if name.startswith(("input", "tensor"))]


def _operation(func: Any) -> str:
    name = func._schema.name.partition("::")[2].replace("_", "")
    return next((each for each in _OPERATIONS if each.replace("_", "") in name), name)


def _ranks(handle: Any) -> Ranks:
    """Return the global ranks of an operator's group argument: a name, a ProcessGroup, or a boxed ProcessGroup."""
    if isinstance(handle, str):
        handle = _resolve_process_group(handle)  # type: ignore[arg-type]
    elif not isinstance(handle, dist.ProcessGroup):
        handle = dist.ProcessGroup.unbox(handle)
    return tuple(dist.get_process_group_ranks(handle))
