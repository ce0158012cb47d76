"""The process groups of a mesh and their purposes, for the banner and the traffic table."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from components.distributed.mesh import Mesh

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
