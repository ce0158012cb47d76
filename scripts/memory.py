"""Measure how each mesh axis changes the memory of a rank, on gloo processes of this machine.

python scripts/memory.py                                    # a Llama and a Qwen3-MoE of 100 MB with random weights
python scripts/memory.py model=smollm2_135m --degrees 2     # any model, two ranks on each axis
python scripts/memory.py model=tiny --seq 512 --out memory.md

Takes the model options of recipes/finetune.py. For each mesh, it starts the processes, trains two steps in float32 and
measures the second. It prints a table per model, and writes Markdown to --out; each figure is the maximum over the
ranks.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from components.config.schema.parallelism import ContextAttention, ParallelismConfig, Strategy
from components.config.shape import read_shape
from components.planning.formulas.workload import three_digits
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.run_files import atomic_write
from components.terminal import exit_with, fit, fit_table, print_text
from scripts._memory.options import MEASURED, models_to_measure, read_options

if TYPE_CHECKING:
    from scripts._memory.ranks import Usage

MIB = 2**20
STATE_SEQ, STATE_MICRO_BATCHES = 128, 4
"""Tokens per row and rows per step for all axes but cp, which is measured on one row of --seq tokens."""


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
    short: dict[str, dict[str, Any]] = {
        "dp_shard": {},
        "tp": {},
        "tp with sequence_parallel": {"sequence_parallel": True},
        "pp": {},
    }
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


HEADER = ("mesh", "parameters", "gradients", "optimizer", "activations", "peak of a step")


def table(shapes: list[Shape], figures: dict[str, Usage | str]) -> list[list[str]]:
    """Return the rows of a table: MiB, and in parentheses the fraction of the single process's figure."""
    rows = []
    for shape in shapes:
        usage = figures[shape.name]
        baseline = figures[next(each.name for each in shapes if each.world == 1 and each.long == shape.long)]
        if isinstance(usage, str) or isinstance(baseline, str):
            rows.append([f"{shape.name} rejected: {usage}", "", "", "", "", ""])
            continue
        cells = [
            three_digits(value / MIB) + (f" ({value / single:.2f})" if shape.world > 1 else "")
            for value, single in zip(astuple(usage), astuple(baseline), strict=True)
        ]
        rows.append([shape.name, *cells])
    return rows


def main(arguments: list[str]) -> int:
    """Compose the configs, measure and print the tables. Config errors are reported before torch is imported."""
    # The allocator warns about frees of memory that was allocated before profiling started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        options, overrides = read_options(arguments, __doc__)
        measured = models_to_measure(overrides)
        lines = []
        for name, cfg in measured.items():
            from components.presentation import markdown_table
            from scripts._memory.ranks import Load, measure_all

            shapes = shapes_of(options.degrees, options.seq, bool(read_shape(cfg).experts))
            loads = {True: Load(options.seq), False: Load(STATE_SEQ, STATE_MICRO_BATCHES)}
            figures = measure_all(
                cfg, {shape.name: (shape.parallelism, loads[shape.long], shape.world) for shape in shapes}
            )
            rows = table(shapes, figures)
            lines += [f"{name}{MEASURED}", "", *markdown_table(HEADER, rows), ""]
            fitted = [line for row in fit_table(HEADER, rows, {0}) for line in row]
            print_text(fit(f"{name}{MEASURED}"), "", *fitted, "", sep="\n", flush=True)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    if options.out is not None:
        atomic_write(options.out, "\n".join(lines))
    return 0


if __name__ == "__main__":
    exit_with(main)
