"""Coordinates, groups and nodes of global ranks, from the order of the mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from components.config.schema.parallelism import AXES, MeshShape


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks of a mesh on nodes. The axes are ordered pp, dp_replicate, dp_shard, ep, cp, tp; tp varies fastest, and
    consecutive ranks fill node after node."""

    mesh: MeshShape
    ranks_per_node: int

    @property
    def axes(self) -> list[str]:
        """Axes larger than 1, outermost first."""
        return [axis for axis in AXES if self.mesh.degree(axis) > 1]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.mesh.world / self.ranks_per_node)

    def stride(self, axis: str) -> int:
        """Return the distance of neighbors on an axis: the product of the degrees inside of it."""
        return math.prod(self.mesh.degree(inner) for inner in AXES[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank on an axis."""
        return rank // self.stride(axis) % self.mesh.degree(axis)

    def group(self, axis: str, rank: int = 0) -> range:
        """Return the ranks of the group of `rank` on an axis."""
        stride = self.stride(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return range(first, first + stride * self.mesh.degree(axis), stride)

    def axis_of(self, rank: int) -> str | None:
        """Return the axis whose group of rank 0 has `rank`; None for rank 0 itself and ranks of no such group.

        There is at most one: a member of the group differs from rank 0 in the coordinate of this axis only.
        """
        others = [axis for axis in self.axes if self.coordinate(rank, axis)]
        return others[0] if len(others) == 1 else None

    def node(self, number: int) -> range:
        """Return the ranks of a node."""
        first = number * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.mesh.world))

    def node_axes(self, number: int) -> list[str]:
        """Return the axes whose group of rank 0 has ranks on a node, outermost first."""
        ranks = self.node(number)
        found = {axis for axis in self.axes if any(each in ranks for each in self.group(axis))}
        return [axis for axis in self.axes if axis in found]

    def nodes_of(self, axis: str) -> int:
        """Return the number of nodes that rank 0's group on an axis has ranks on."""
        return len({rank // self.ranks_per_node for rank in self.group(axis)})


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks at equal distances as text: `0, 8, 16, ..., 56`, or `0-7` for more than four neighbors."""
    if len(ranks) > 4 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    listed = [str(rank) for rank in ranks]
    return ", ".join(listed if len(listed) <= 5 else [*listed[:3], "...", listed[-1]])
