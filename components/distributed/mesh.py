"""The device mesh: six axes, a process group for each axis larger than 1, and flattened views over several axes."""

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
"""Flattened view -> its axes, outermost first."""

WORLD = "world"
PURPOSES = {
    "pp": "hidden states between stages",
    "dp_replicate": "gradients all-reduced",
    "dp_shard": "dense parameters gathered, gradients reduce-scattered",
    "ep": "tokens to their experts",
    "cp": "keys and values, statistics of routers",
    "tp": "activations inside layers, gradients of replicated parameters",
    "dp": "sums over ranks with different samples",
    "dp_cp": "sums over ranks with different tokens",
    "fsdp": "dense parameters gathered, gradients reduce-scattered",
    "ep_tp": "tokens to their experts",
    "efsdp": "experts' parameters gathered, gradients reduce-scattered",
    WORLD: "sums of losses, tokens, stop flags",
}
"""Axis or flattened view -> the data its collectives move."""

Ranks = tuple[int, ...]
"""Global ranks of a process group. Several torch groups over the same ranks are treated as one."""


@dataclass(slots=True)
class Mesh:
    """A DeviceMesh with sizes, ranks and flattened views by name.

    Only axes larger than 1 are mesh dims, besides dp_shard, which FSDP2 always needs. Views are flattened on first use,
    so that no process group is created that no collective uses.
    """

    device_mesh: DeviceMesh
    shape: MeshShape
    sequence_multiple: int = 1
    """Sequences are padded to a multiple of this many tokens."""
    head_stage: int = 0
    """Rank on the pp axis that holds the last layers and the head, and computes the loss."""
    _views: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    def __contains__(self, axis: str) -> bool:
        return axis in self._names

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return the 1-D mesh of an axis or view. Raises KeyError if it is not in the mesh."""
        if name in self._names:
            return self.device_mesh[name]
        if name not in self._views:
            self._views[name] = self._flatten(name)
        return self._views[name]

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis or view; 1 if it is not in the mesh."""
        return math.prod(self.shape.degree(axis) for axis in VIEWS.get(name, (name,)))

    def rank(self, name: str) -> int:
        """Return this rank's coordinate along an axis or view; 0 if it is not in the mesh. Creates no process group."""
        rank = 0
        for axis in VIEWS.get(name, (name,)):
            if axis in self._names:
                rank = rank * self.shape.degree(axis) + self.device_mesh.get_local_rank(axis)
        return rank

    @property
    def sharding(self) -> DeviceMesh:
        """Mesh that dense parameters are sharded over: (fsdp,), or (dp_replicate, fsdp) for hybrid sharding."""
        return self._sharding("fsdp")

    @property
    def expert_sharding(self) -> DeviceMesh:
        """Mesh that experts are sharded over besides ep: (efsdp,), or (dp_replicate, efsdp) for hybrid sharding."""
        return self._sharding("efsdp")

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens and losses are included in a sum over all ranks.

        tp ranks and pipeline stages process the same tokens, so only tp rank 0 of the stage with the loss is included.
        """
        return self.rank("tp") == 0 and self.rank("pp") == self.head_stage

    @property
    def coordinates(self) -> str:
        """This rank's coordinate on every axis larger than 1, for the banner."""
        coordinates = [f"{axis} {self.rank(axis)}" for axis in AXES if self.size(axis) > 1]
        return ", ".join(coordinates) or "alone"

    @property
    def idle_axes(self) -> frozenset[str]:
        """Axes with a process group that no collective of a training step uses.

        With cp, parameters are sharded over the flattened view of dp_shard and cp, never over dp_shard alone.
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
        present = tuple(axis for axis in VIEWS[view] if axis in self._names)
        axes = tuple(axis for axis in present if self.size(axis) > 1) or present[:1]
        if not axes:
            raise KeyError(f"the mesh {self.shape} has no axis of the view {view!r}")
        if len(axes) == 1:
            return self.device_mesh[axes[0]]
        flat = self.device_mesh[axes]._flatten(view)
        share_timeout(flat.get_group())
        return flat


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """This rank's group along an axis or a view of the mesh."""

    ranks: Ranks
    axes: str
    """Axis or view; several names over the same ranks are joined by " = "."""
    purpose: str
    """Data that the group's collectives move."""

    def __str__(self) -> str:
        return f"{self.axes}: {len(self.ranks)} ranks, {self.purpose}"


def build_mesh(parallelism: ParallelismConfig, device_type: str) -> Mesh:
    """Build the mesh over all ranks, outermost axis first: pp, dp_replicate, dp_shard, ep, cp, tp.

    Args:
        parallelism: Degrees of the axes; one may be -1 and is inferred from the world size.
        device_type: Device of the parameters, `cpu` or `cuda`.

    Raises ConfigError if the product of the degrees is not the world size.
    """
    shape = parallelism.resolve(dist.get_world_size())
    degrees = asdict(shape)
    names = [axis for axis in AXES if degrees[axis] > 1]
    # fully_shard requires a mesh even if there is nothing to shard.
    if "dp_shard" not in names and (parallelism.strategy != Strategy.ddp or not names):
        names = [axis for axis in AXES if axis in names or axis == "dp_shard"]
    sizes = tuple(degrees[name] for name in names)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))
    for name in names:
        share_timeout(device_mesh.get_group(name))
    return Mesh(device_mesh, shape, parallelism.sequence_multiple(shape), parallelism.stage_ranks(shape.pp)[-1])


def share_timeout(group: dist.ProcessGroup) -> None:
    """Give a process group the collective timeout of the default group.

    init_device_mesh and _flatten create groups with torch's default timeout and have no argument for it.
    """
    world = _get_default_group()
    if dist.get_backend(world) != dist.Backend.FAKE:
        _set_pg_timeout(world._get_backend(world._device_types[0]).options._timeout, group)


def init_distributed(config: ParallelismConfig, seed: int = 42) -> DeviceMesh | None:
    """Start the process group, build the mesh and seed all generators, as KempnerForge's distributed.setup.

    Returns None for a single process. Random streams differ between pipeline stages and are equal on all other axes.
    Unlike the published version, supports CPU and the cp axis, and may be called again with the same config.
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
    """Seed all random generators of this process: equal streams on tp ranks, distinct ones on pp, dp and cp ranks.

    tp ranks compute the same activations and must draw the same dropout masks. Under sequence parallelism each tp rank
    applies its shard of a common mask (`ShardedDropout`). Raises ConfigError for a seed out of range.
    """
    index = 0
    for axis in ("pp", "cp", "dp"):  # dp innermost: a rank's stream is dp_rank's on a mesh of dp alone
        index = index * mesh.size(axis) + mesh.rank(axis)
    _set_seed((seed + 1_000_003 * index) % 2**32, rank=dist.get_rank(), pp_rank=0)


def groups_of_mesh(mesh: Mesh) -> list[MeshGroup]:
    """Return this rank's process groups of more than one rank: axes outermost first, then views, then the world.

    Only views flattened so far are listed, so call this after the model was parallelized. Axes that no collective of a
    step uses are left out. Names over the same ranks, such as an axis that spans the world, are listed as one group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    root = mesh.device_mesh._get_root_mesh()
    used = [name for name in root.mesh_dim_names or () if name not in mesh.idle_axes]
    groups = [(name, root.get_group(name)) for name in used]
    # torch has no public list of the flattened views.
    groups += [(name, view.get_group()) for name, view in root._flatten_mapping.items()]
    groups.append((WORLD, _get_default_group()))
    names: dict[Ranks, list[str]] = {}
    for name, group in groups:
        if group.size() > 1:
            names.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(name)
    return [MeshGroup(ranks, " = ".join(axes), _purpose(axes)) for ranks, axes in names.items()]


def _purpose(names: list[str]) -> str:
    purposes = [PURPOSES.get(name, f"unknown view {name}") for name in names]
    return "; ".join(dict.fromkeys(purposes))
