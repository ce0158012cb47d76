"""Every mesh of N processes, and whether a model and its batch allow it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from components.config.micro_batches import fit_micro_batches
from components.config.schema.parallelism import AXES, ActivationCheckpointing, MeshShape, ParallelismConfig, Strategy
from components.config.schema.recipes import FinetuneConfig
from components.config.shape import ModelShape
from components.config.validate import validate

RECOMPUTE = tuple(policy for policy in ActivationCheckpointing if policy != ActivationCheckpointing.auto)
"""Every policy of activation checkpointing; `auto` chooses one of them."""
NAME = re.compile(rf"(?:ddp\d+|(?:(?:{'|'.join(AXES)})\d+)(?:_(?:{'|'.join(AXES)})\d+)*(?:_sp)?)")
"""Mesh names, such as pp2_dp_shard2_tp2_sp; a policy of activation checkpointing may follow."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The config of a run on one mesh, or the reasons why there cannot be one."""

    name: str
    cfg: FinetuneConfig
    problems: tuple[str, ...] = ()

    @property
    def is_legal(self) -> bool:
        """Whether the mesh can be run."""
        return not self.problems


def mesh_shapes(processes: int) -> Iterator[MeshShape]:
    """Yield every combination of axis degrees whose product is `processes`."""
    divisors = [degree for degree in range(1, processes + 1) if processes % degree == 0]
    for degrees in product(divisors, repeat=len(AXES)):
        shape = MeshShape(**dict(zip(AXES, degrees, strict=True)))
        if shape.world == processes:
            yield shape


def all_layouts(
    processes: int, base: ParallelismConfig, recompute: Sequence[ActivationCheckpointing] | None = None
) -> Iterator[ParallelismConfig]:
    """Yield every mesh of `processes` under fsdp2, with sequence parallel off and on where tp > 1, and ddp.

    Everything else in `base` (schedule of pp, attention of cp, tp plan) stays.

    Args:
        recompute: Policies of activation checkpointing to combine with each mesh; None: that of `base` alone.
    """
    for layout in _meshes(processes, base):
        for policy in recompute or (base.activation_checkpointing,):
            yield replace(layout, activation_checkpointing=policy)


def _meshes(processes: int, base: ParallelismConfig) -> Iterator[ParallelismConfig]:
    for shape in mesh_shapes(processes):
        degrees = asdict(shape)
        for sequence_parallel in (False, True) if shape.tp > 1 else (False,):
            yield replace(base, strategy=Strategy.fsdp2, sequence_parallel=sequence_parallel, **degrees)
    if processes > 1:
        alone: dict[str, Any] = {**dict.fromkeys(AXES, 1), "dp_replicate": processes}
        yield replace(base, strategy=Strategy.ddp, sequence_parallel=False, cpu_offload=False, **alone)


def name_of(parallelism: ParallelismConfig, processes: int) -> str:
    """Return the name of a mesh: its axes larger than 1, or `ddp` and its size.

    `sp` follows for sequence parallel, and the policy of activation checkpointing unless it is none.
    """
    degrees = asdict(parallelism.resolve(processes))
    policy = parallelism.activation_checkpointing
    recomputed = [str(policy)] * (policy != ActivationCheckpointing.none)
    if parallelism.strategy == Strategy.ddp:
        return "_".join([f"ddp{processes}", *recomputed])
    parts = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
    parts = parts + ["sp"] * parallelism.sequence_parallel or [str(parallelism.strategy)]
    return "_".join(parts + recomputed)


def layout_of(name: str, base: ParallelismConfig) -> ParallelismConfig | None:
    """Return the mesh of a name made by `name_of`, None for any other name; the policy defaults to that of `base`."""
    policy = next((each for each in RECOMPUTE if name.endswith(f"_{each}")), None)
    name = name.removesuffix(f"_{policy}")
    base = replace(base, activation_checkpointing=policy or base.activation_checkpointing)
    if not NAME.fullmatch(name):
        return None
    if name.startswith("ddp"):
        return next(each for each in all_layouts(int(name[3:]), base) if each.strategy == Strategy.ddp)
    parts = name.removesuffix("_sp").replace("dp_", "dp-").split("_")
    degrees = {re.sub(r"\d+$", "", part).replace("-", "_"): int(re.findall(r"\d+$", part)[0]) for part in parts}
    axes: dict[str, Any] = {axis: degrees.get(axis, 1) for axis in AXES}
    return replace(base, strategy=Strategy.fsdp2, sequence_parallel=name.endswith("_sp"), **axes)


def plan_mesh(
    name: str, parallelism: ParallelismConfig, cfg: FinetuneConfig, processes: int, shape: ModelShape
) -> MeshPlan:
    """Return the plan of `cfg` on a mesh; the global batch and the sequence length stay those of `cfg`."""
    planned = replace(cfg, parallelism=parallelism)
    problems = validate(planned, processes, shape)
    return MeshPlan(name, cfg, tuple(problems)) if problems else MeshPlan(name, fit_micro_batches(planned, processes))


def plan_all(
    cfg: FinetuneConfig, processes: int, shape: ModelShape, recompute: Sequence[ActivationCheckpointing] | None = None
) -> list[MeshPlan]:
    """Return a plan for every mesh of `processes`, including those that are refused, with their reasons.

    Args:
        recompute: Policies of activation checkpointing to combine with each mesh; None: that of `cfg` alone.
    """
    return [
        plan_mesh(name_of(parallelism, processes), parallelism, cfg, processes, shape)
        for parallelism in all_layouts(processes, cfg.parallelism, recompute)
    ]
