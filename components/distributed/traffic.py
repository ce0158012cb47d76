"""Which collectives a piece of code runs: over which group, how often, and how many bytes.

torch's CommDebugMode counts operators. It knows neither the group of a call nor its bytes, does not see sends and
receives, and refuses to run around compiled layers. Its way to look into DTensors holds and is used here.
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

from components.distributed.mesh import Mesh
from components.distributed.mesh_groups import Ranks, groups_of_mesh

OPERATIONS = (
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
"""What operators are called in a table: by the first of these that is in their name."""

RECORDED_STEP = 2
"""The step of a run that is recorded: the first one also sets things up."""


@dataclass(slots=True)
class Volume:
    """How much one kind of operation moved."""

    calls: int = 0
    bytes: int = 0
    """What this rank put in: see `record_traffic`."""


@dataclass(slots=True)
class Traffic:
    """What was recorded."""

    volumes: dict[tuple[Ranks, str], Volume] = field(default_factory=dict)
    """(global ranks of the group, operation) -> volume, in the order of the first call."""

    @property
    def groups(self) -> set[Ranks]:
        """The groups that something used."""
        return {group for group, _ in self.volumes}


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record every collective and point-to-point operation of this rank within, forward and backward.

    Seen are the operators of torch.distributed (FSDP2, DDP, your own calls) and the functional ones (DTensor), on any
    backend, also those of compiled layers; groups of one rank move nothing and are left out.

    Bytes are those of the tensors that this rank puts into an operation: of an all-gather its own part, of a
    reduce-scatter, all-reduce or all-to-all all that it brings, of a send what it sends; of a receive what arrives.
    (NCCL's tests count the larger side of every operation: that is ranks x this number for an all-gather.) Copies of
    a ring or tree within an operation are the backend's own and not counted.
    """
    recorder = _Recorder()
    with recorder:
        yield recorder.traffic


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """A line of the table: one kind of operation over one group."""

    group: str
    """Axes or views of the mesh that the group serves."""
    purpose: str
    operation: str
    calls: int
    bytes: int
    """What this rank put in: see `record_traffic`."""


class StepTraffic:
    """Records the second optimizer step of a run and shows its table; does nothing where it is not enabled."""

    def __init__(self, mesh: Mesh, show: Callable[[list[TrafficRow]], None], *, enabled: bool) -> None:
        self._mesh, self._show, self._enabled = mesh, show, enabled
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step belongs into this context."""
        self._steps += 1
        if not self._enabled or self._steps != RECORDED_STEP:
            yield
            return
        with record_traffic() as traffic:
            yield
        self._show(traffic_table(traffic, self._mesh))


def traffic_table(traffic: Traffic, mesh: Mesh) -> list[TrafficRow]:
    """Return what was recorded, by the groups of the mesh in their order; groups of no axis come last."""
    known = {each.ranks: each for each in groups_of_mesh(mesh)}
    order = [*known, *(ranks for ranks in traffic.groups if ranks not in known)]
    rows = []
    for (ranks, operation), volume in sorted(traffic.volumes.items(), key=lambda item: order.index(item[0][0])):
        axes = known[ranks].axes if ranks in known else f"ranks {', '.join(map(str, ranks))}"
        purpose = known[ranks].purpose if ranks in known else "not a group of the mesh"
        rows.append(TrafficRow(axes, purpose, operation, volume.calls, volume.bytes))
    return rows


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._arguments: dict[Any, tuple[int, list[int]] | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Off while torch.compile works, on while what it made runs; otherwise it refuses to compile in a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor answers first, and what it is made of comes back here
        kwargs = kwargs or {}
        if func not in self._arguments:
            self._arguments[func] = _find_arguments(func)
        found = self._arguments[func]
        if found is not None:
            place, inputs = found
            given = dict(enumerate(args)) | {
                index: kwargs[argument.name]
                for index, argument in enumerate(func._schema.arguments)
                if argument.name in kwargs
            }
            self._count(_operation(func), given[place], [given.get(index) for index in inputs])
        return func(*args, **kwargs)

    def _count(self, operation: str, handle: Any, inputs: list[Any]) -> None:
        ranks = _ranks(handle)
        if len(ranks) == 1:
            return
        volume = self.traffic.volumes.setdefault((ranks, operation), Volume())
        volume.calls += 1
        if operation != "barrier":
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            volume.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _find_arguments(func: Any) -> tuple[int, list[int]] | None:
    """Return the places of the group and of the input tensors among an operator's arguments; None: no group.

    By their names, so that no list of operators can be out of date.
    """
    # Higher-order operators have no schema.
    names = [argument.name for argument in func._schema.arguments] if isinstance(func, OpOverload) else []
    places = [index for index, name in enumerate(names) if name in ("process_group", "group_name")]
    if not places:
        return None
    return places[0], [index for index, name in enumerate(names) if name.startswith(("input", "tensor"))]


def _operation(func: Any) -> str:
    name = func._schema.name.partition("::")[2].replace("_", "")
    return next((each for each in OPERATIONS if each.replace("_", "") in name), name)


def _ranks(handle: Any) -> Ranks:
    """The members of the group behind what operators are given: a name, a group, or a group in the dispatcher's box."""
    if isinstance(handle, str):
        handle = _resolve_process_group(handle)  # type: ignore[arg-type]
    elif not isinstance(handle, dist.ProcessGroup):
        handle = dist.ProcessGroup.unbox(handle)
    return tuple(dist.get_process_group_ranks(handle))
