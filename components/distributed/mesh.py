"""The device mesh: six axes, a process group for each that is larger than 1, and the flattened views over them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

from components.config.schema.parallelism import AXES, MeshShape, ParallelismConfig, Strategy
from components.distributed.init import _barrier_with_timeout, _set_nccl_env, _set_seed, get_world_info
from components.distributed.process.process_group import start_process_group

VIEWS = {
    "dp": ("dp_replicate", "dp_shard", "ep"),
    "dp_cp": ("dp_replicate", "dp_shard", "ep", "cp"),
    "fsdp": ("dp_shard", "ep", "cp"),
    "efsdp": ("dp_shard", "cp"),
}
"""Flattened view -> the axes it flattens."""


@dataclass(slots=True)
class Mesh:
    """A DeviceMesh with what recipes ask of it. Only axes larger than 1 are mesh dims (dp_shard stays for FSDP2).

    Views are flattened at their first use, so that no view has a process group that no collective uses.
    """

    device_mesh: DeviceMesh
    shape: MeshShape
    sequence_multiple: int = 1
    """Rows are padded to a multiple of this many tokens."""
    head_stage: int = 0
    """The place on the pp axis that holds the last layers and the head, and so the loss."""
    _views: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    def __contains__(self, axis: str) -> bool:
        return axis in self._names

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return the 1-D mesh of an axis or of a view (`dp`, `dp_cp`, `fsdp`). KeyError where it is not in the mesh."""
        if name in self._names:
            return self.device_mesh[name]
        if name not in self._views:
            self._views[name] = self._flatten(name)
        return self._views[name]

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis or view; 1 where it is not in the mesh."""
        return math.prod(self.shape.degree(axis) for axis in VIEWS.get(name, (name,)))

    def rank(self, name: str) -> int:
        """Return this rank's coordinate along an axis or view; 0 where it is not in the mesh. Needs no group."""
        rank = 0
        for axis in VIEWS.get(name, (name,)):
            if axis in self._names:
                rank = rank * self.shape.degree(axis) + self.device_mesh.get_local_rank(axis)
        return rank

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh that dense parameters are laid over: (fsdp,), or (dp_replicate, fsdp) for hybrid sharding."""
        return self._sharding("fsdp")

    @property
    def expert_sharding(self) -> DeviceMesh:
        """The mesh that experts are laid over beside ep: (efsdp,), or (dp_replicate, efsdp) for hybrid sharding."""
        return self._sharding("efsdp")

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens and losses count in a sum over all ranks.

        tp ranks and pipeline stages read the same tokens: tp rank 0 of the stage that has the loss counts.
        """
        return self.rank("tp") == 0 and self.rank("pp") == self.head_stage

    @property
    def coordinates(self) -> str:
        """This rank's place on every axis that has more than one."""
        places = [f"{axis} {self.rank(axis)}" for axis in AXES if self.size(axis) > 1]
        return ", ".join(places) or "alone"

    @property
    def idle_axes(self) -> frozenset[str]:
        """Axes over which no collective of a training step runs, although their groups work.

        With cp, parameters are gathered over the view that flattens dp_shard and cp, never over dp_shard alone.
        """
        return frozenset({"dp_shard"} if self.shape.dp_shard > 1 and self.shape.cp > 1 else ())

    @property
    def _names(self) -> tuple[str, ...]:
        return self.device_mesh.mesh_dim_names or ()

    def _sharding(self, view: str) -> DeviceMesh:
        if self.size("dp_replicate") == 1:
            return self[view]
        return self.device_mesh["dp_replicate", self[view].mesh_dim_names[0]]  # type: ignore[index]

    def _flatten(self, view: str) -> DeviceMesh:
        held = tuple(axis for axis in VIEWS[view] if axis in self._names)
        axes = tuple(axis for axis in held if self.size(axis) > 1) or held[:1]
        if not axes:
            raise KeyError(f"the mesh {self.shape} has no axis of the view {view!r}")
        if len(axes) == 1:
            return self.device_mesh[axes[0]]
        flat = self.device_mesh[axes]._flatten(view)
        share_timeout(flat.get_group())
        return flat


def build_mesh(parallelism: ParallelismConfig, device_type: str) -> Mesh:
    """Lay all processes out as a mesh, outermost axis first: pp, dp_replicate, dp_shard, ep, cp, tp.

    Args:
        parallelism: Degrees of the axes; one may be -1.
        device_type: `cpu` or `cuda`, where the parameters live.

    Raises ConfigError where the degrees do not multiply to the number of processes.
    """
    shape = parallelism.resolve(dist.get_world_size())
    degrees = asdict(shape)
    names = [axis for axis in AXES if degrees[axis] > 1]
    # FSDP2 makes every parameter a DTensor on one mesh, whether or not there is anything to shard.
    if "dp_shard" not in names and (parallelism.strategy != Strategy.ddp or not names):
        names = [axis for axis in AXES if axis in names or axis == "dp_shard"]
    sizes = tuple(degrees[name] for name in names)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))
    for name in names:
        share_timeout(device_mesh.get_group(name))
    return Mesh(device_mesh, shape, parallelism.sequence_multiple(shape), parallelism.stage_places(shape.pp)[-1])


def share_timeout(group: dist.ProcessGroup) -> None:
    """Let collectives of a group end when those of all ranks would: torch gives groups of a mesh its own default."""
    world = _get_default_group()
    if dist.get_backend(world) != dist.Backend.FAKE:
        _set_pg_timeout(world._get_backend(world._device_types[0]).options._timeout, group)


def init_distributed(config: ParallelismConfig, seed: int = 42) -> DeviceMesh | None:
    """Start the processes, build the mesh and seed every generator (seed page 003, KempnerForge).

    Dropout streams differ between pipeline stages and are equal elsewhere, as the page says. Returns None for a
    single process. CPU and CUDA alike; all six axes take part (the published version forgets cp). Calling it again
    with the same config returns an equal mesh over the same processes.
    """
    if get_world_info()[2] > 1:
        _set_nccl_env()
    info = start_process_group("auto")
    if info.world_size == 1:
        _set_seed(seed, rank=0)
        return None
    mesh = build_mesh(config, info.device.type)
    _barrier_with_timeout(60.0, reason="construction of the device mesh")
    _set_seed(seed, rank=info.rank, pp_rank=mesh.rank("pp"))
    return mesh.device_mesh


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Seed every generator of this process: equal streams on tp ranks, distinct ones on pp, dp and cp ranks.

    tp ranks compute the same activations, so they have to drop alike. Activations that sequence parallelism shards
    get distinct parts of one mask (`ShardedDropout`). Raises ConfigError where no generator could take the seed.
    """
    index = 0
    for axis in ("pp", "cp", "dp"):  # a mesh of dp ranks alone keeps the streams that it always had
        index = index * mesh.size(axis) + mesh.rank(axis)
    _set_seed((seed + 1_000_003 * index) % 2**32, rank=dist.get_rank(), pp_rank=0)
