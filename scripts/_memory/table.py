"""The meshes that scripts/memory.py measures, and the table of results."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from components.config.schema.parallelism import ContextAttention, ParallelismConfig, Strategy

if TYPE_CHECKING:
    from scripts._memory.ranks import Usage

MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """A mesh to measure."""

    name: str
    parallelism: ParallelismConfig
    world: int
    long: bool
    """Measured on a row of --seq tokens (the cp meshes and their baseline)."""


def shapes_of(degrees: list[int], seq: int, experts: bool) -> list[Shape]:
    """Return the meshes: a single process, then each axis alone with each degree; `ep` only for MoE models."""
    single = ParallelismConfig(strategy=Strategy.single, dp_shard=1)
    short: dict[str, dict[str, Any]] = {"dp_shard": {}, "tp": {}, "tp with sequence_parallel": {}, "pp": {}}
    short["tp with sequence_parallel"] = {"sequence_parallel": True}
    if experts:
        short["ep"] = {}
    long = {f"cp by {each}": {"cp_attention": each} for each in (ContextAttention.ulysses, ContextAttention.all_gather)}
    found = []
    for name, axes, is_long in (("single", short, False), (f"single, rows of {seq}", long, True)):
        found.append(Shape(name, single, 1, is_long))
        for axis, options in axes.items():
            for degree in degrees:
                degrees_of = {"dp_shard": 1, axis.split()[0]: degree}
                found.append(Shape(f"{axis} {degree}", ParallelismConfig(**degrees_of, **options), degree, is_long))
    return found


def table(shapes: list[Shape], figures: dict[str, Usage | str]) -> list[str]:
    """Return the lines of a Markdown table: MiB, and in parentheses the fraction of the single process's figure."""
    lines = [
        "| mesh | parameters | gradients | optimizer | saved for the backward | peak of a step |",
        "|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        usage = figures[shape.name]
        baseline = figures[next(each.name for each in shapes if each.world == 1 and each.long == shape.long)]
        if isinstance(usage, str) or isinstance(baseline, str):
            lines.append(f"| {shape.name} | refused: {usage} | | | | |")
            continue
        cells = [
            f"{value / MIB:.1f}" + (f" ({value / single:.2f})" if shape.world > 1 else "")
            for value, single in zip(astuple(usage), astuple(baseline), strict=True)
        ]
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    return lines
