"""Which process groups a mesh has, and what each of them is for."""

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
    "tp": "activations inside layers, gradients of what all hold whole",
    "dp": "sums over ranks that see different samples",
    "dp_cp": "sums over ranks that see different tokens",
    "fsdp": "dense parameters gathered, gradients reduce-scattered",
    "ep_tp": "tokens to their experts",
    "efsdp": "experts' parameters gathered, gradients reduce-scattered",
    WORLD: "sums of losses, tokens, stop flags",
}
"""Axis or flattened view -> what its collectives carry."""

Ranks = tuple[int, ...]
"""A process group, by its members as global ranks: torch may have two for the same ones, and they are one to us."""


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """This rank's group along an axis or a view of the mesh."""

    ranks: Ranks
    axes: str
    """The axis or view; several, joined by "=", where they are the same ranks."""
    purpose: str
    """What it is for, in a few words."""

    def __str__(self) -> str:
        return f"{self.axes}: {len(self.ranks)} ranks, {self.purpose}"


def groups_of_mesh(mesh: Mesh) -> list[MeshGroup]:
    """Return this rank's process groups of more than one rank: axes outermost first, then views, then the world.

    Views are those flattened so far: ask after the model was laid over the mesh. Axes that no collective of a step uses
    are left out. Names of the same ranks, such as an axis that is the whole world,
    are listed together.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    root = mesh.device_mesh._get_root_mesh()
    used = [name for name in root.mesh_dim_names or () if name not in mesh.idle_axes]
    found = [(name, root.get_group(name)) for name in used]
    # torch has no public list of the views that were flattened.
    found += [(name, view.get_group()) for name, view in root._flatten_mapping.items()]
    found.append((WORLD, _get_default_group()))
    names: dict[Ranks, list[str]] = {}
    for name, group in found:
        if group.size() > 1:
            names.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(name)
    return [MeshGroup(ranks, " = ".join(serves), _purpose(serves)) for ranks, serves in names.items()]


def _purpose(names: list[str]) -> str:
    told = [PURPOSES.get(name, f"not told of the view {name}") for name in names]
    return "; ".join(dict.fromkeys(told))
