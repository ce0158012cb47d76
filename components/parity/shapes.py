"""Config of a run on every mesh of N processes, or why it cannot run there. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from components.config.mesh_rules import all_layouts, fit_micro_batches, name_of
from components.config.rules import validate
from components.config.schema.parallelism import ActivationCheckpointing, ParallelismConfig
from components.config.schema.recipes import FinetuneConfig
from components.config.shape import ModelShape


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Config of a run on one mesh, or the reasons why it cannot run there."""

    name: str
    cfg: FinetuneConfig
    problems: tuple[str, ...] = ()

    @property
    def is_legal(self) -> bool:
        """Whether the config can run on the mesh."""
        return not self.problems


def plan_mesh(
    name: str, parallelism: ParallelismConfig, cfg: FinetuneConfig, processes: int, shape: ModelShape
) -> MeshPlan:
    """Plan `cfg` on a mesh, with the global batch size and the sequence length of `cfg`."""
    planned = replace(cfg, parallelism=parallelism)
    problems = validate(planned, processes, shape)
    return MeshPlan(name, cfg, tuple(problems)) if problems else MeshPlan(name, fit_micro_batches(planned, processes))


def plan_all(
    cfg: FinetuneConfig, processes: int, shape: ModelShape, recompute: Sequence[ActivationCheckpointing] | None = None
) -> list[MeshPlan]:
    """Return a plan for every mesh of `processes`, including those that cannot run, with the reasons.

    Args:
        recompute: Policies of activation checkpointing to combine with each mesh; None: only that of `cfg`.
    """
    return [
        plan_mesh(name_of(parallelism, processes), parallelism, cfg, processes, shape)
        for parallelism in all_layouts(processes, cfg.parallelism, recompute)
    ]
