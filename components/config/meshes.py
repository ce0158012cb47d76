"""All meshes of N processes, and their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from components.config.schema.parallelism import AXES, ActivationCheckpointing, MeshShape, ParallelismConfig, Strategy

RECOMPUTE = tuple(policy for policy in ActivationCheckpointing if policy != ActivationCheckpointing.auto)
"""Policies of activation checkpointing, except `auto`, which selects one of them."""
_DEGREE = "[0-9]{1,6}"
NAME = re.compile(rf"(?:ddp{_DEGREE}|(?:(?:{'|'.join(AXES)}){_DEGREE})(?:_(?:{'|'.join(AXES)}){_DEGREE})*(?:_sp)?)")
"""Mesh names such as pp2_dp_shard2_tp2_sp, without the optional policy of activation checkpointing at the end."""


def mesh_shapes(processes: int) -> Iterator[MeshShape]:
    """Yield every combination of axis degrees whose product is `processes`."""
    for degrees in _factorizations(processes, len(AXES)):
        yield MeshShape(**dict(zip(AXES, degrees, strict=True)))


def _factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered tuple of `factors` integers whose product is `number`, in ascending order."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in _factorizations(number // first, factors - 1):
                yield first, *others


def all_layouts(
    processes: int, base: ParallelismConfig, recompute: Sequence[ActivationCheckpointing] | None = None
) -> Iterator[ParallelismConfig]:
    """Yield every mesh of `processes` under fsdp2 (for tp > 1 with and without sequence parallel), and ddp.

    All other values of `base` (pp schedule, cp attention, tp plan) are kept.

    Args:
        recompute: Policies of activation checkpointing to combine with each mesh; None: only that of `base`.
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
        replicated: dict[str, Any] = {**dict.fromkeys(AXES, 1), "dp_replicate": processes}
        yield replace(base, strategy=Strategy.ddp, sequence_parallel=False, cpu_offload=False, **replicated)


def name_of(parallelism: ParallelismConfig, processes: int) -> str:
    """Return the name of a mesh: its axes of size > 1, or `ddp` and its size.

    `sp` is appended for sequence parallel, then the policy of activation checkpointing unless it is none.
    """
    degrees = asdict(parallelism.resolve(processes))
    policy = parallelism.activation_checkpointing
    policy_suffix = [str(policy)] * (policy != ActivationCheckpointing.none)
    if parallelism.strategy == Strategy.ddp:
        return "_".join([f"ddp{processes}", *policy_suffix])
    axes = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
    axes = axes + ["sp"] * parallelism.sequence_parallel or [str(parallelism.strategy)]
    return "_".join(axes + policy_suffix)


def layout_of(name: str, base: ParallelismConfig) -> ParallelismConfig | None:
    """Parse a name from `name_of`; return None for any other name. The policy defaults to that of `base`."""
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
