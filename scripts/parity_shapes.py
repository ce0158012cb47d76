"""Every way to lay N processes out as a mesh, and which of them a model, its batch and its rows allow. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from components.config.batch import fit_micro_batches
from components.config.schema.parallelism import AXES, MeshShape, ParallelismConfig, Strategy
from components.config.schema.recipes import FinetuneConfig
from components.config.shape import ModelShape
from components.config.validate import validate

NAME = re.compile(rf"(?:(?:{'|'.join(AXES)})\d+)(?:_(?:{'|'.join(AXES)})\d+)*(?:_sp)?")
"""Names of meshes, such as pp2_dp_shard2_tp2_sp."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """One mesh, and what a run on it would be; `problems` say why it cannot be."""

    name: str
    cfg: FinetuneConfig
    problems: tuple[str, ...] = ()

    @property
    def is_legal(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems


def mesh_shapes(processes: int) -> Iterator[MeshShape]:
    """Yield every product of the six axes that is `processes`."""
    divisors = [degree for degree in range(1, processes + 1) if processes % degree == 0]
    for degrees in product(divisors, repeat=len(AXES)):
        shape = MeshShape(**dict(zip(AXES, degrees, strict=True)))
        if shape.world == processes:
            yield shape


def all_layouts(processes: int, base: ParallelismConfig) -> Iterator[ParallelismConfig]:
    """Yield every mesh of `processes` under fsdp2, with sequence parallel off and on where tp > 1, and ddp.

    Whatever else `base` says (schedule of pp, attention of cp, tp plan) stays.
    """
    for shape in mesh_shapes(processes):
        degrees = asdict(shape)
        for sequence_parallel in (False, True) if shape.tp > 1 else (False,):
            yield replace(base, strategy=Strategy.fsdp2, sequence_parallel=sequence_parallel, **degrees)
    if processes > 1:
        alone = {**dict.fromkeys(AXES, 1), "dp_replicate": processes}
        yield replace(base, strategy=Strategy.ddp, sequence_parallel=False, cpu_offload=False, **alone)


def name_of(parallelism: ParallelismConfig, processes: int) -> str:
    """Return the name of a mesh: its axes larger than 1, `sp` for sequence parallel, `ddp` for this strategy."""
    degrees = asdict(parallelism.resolve(processes))
    if parallelism.strategy == Strategy.ddp:
        return f"ddp{processes}"
    parts = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
    return "_".join(parts + ["sp"] * parallelism.sequence_parallel) or str(parallelism.strategy)


def layout_of(name: str, base: ParallelismConfig) -> ParallelismConfig | None:
    """Return the mesh that `name_of` calls so, or None for another kind of name."""
    if re.fullmatch(r"ddp\d+", name):
        return next(each for each in all_layouts(int(name[3:]), base) if each.strategy == Strategy.ddp)
    if not NAME.fullmatch(name):
        return None
    parts = name.removesuffix("_sp").replace("dp_", "dp-").split("_")
    degrees = {re.sub(r"\d+$", "", part).replace("-", "_"): int(re.findall(r"\d+$", part)[0]) for part in parts}
    axes = {axis: degrees.get(axis, 1) for axis in AXES}
    return replace(base, strategy=Strategy.fsdp2, sequence_parallel=name.endswith("_sp"), **axes)


def plan_mesh(
    name: str, parallelism: ParallelismConfig, cfg: FinetuneConfig, processes: int, shape: ModelShape
) -> MeshPlan:
    """Return the run of `cfg` on a mesh, or why there is none; the global batch and the rows stay as `cfg` says."""
    planned = replace(cfg, parallelism=parallelism)
    problems = validate(planned, processes, shape)
    return MeshPlan(name, cfg, tuple(problems)) if problems else MeshPlan(name, fit_micro_batches(planned, processes))


def plan_all(cfg: FinetuneConfig, processes: int, shape: ModelShape) -> list[MeshPlan]:
    """Return a plan for every mesh of `processes`, the refused ones with their reasons; none is left out."""
    return [
        plan_mesh(name_of(parallelism, processes), parallelism, cfg, processes, shape)
        for parallelism in all_layouts(processes, cfg.parallelism)
    ]
