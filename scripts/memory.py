"""Measure how each mesh axis changes the memory of a rank, on gloo processes of this machine.

python scripts/memory.py                                    # a Llama and a Qwen3-MoE of 100 MB with random weights
python scripts/memory.py model=smollm2_135m --degrees 2     # any model, two ranks on each axis
python scripts/memory.py model=tiny --seq 512 --out memory.md

Takes the model options of recipes/finetune.py. For each mesh, it starts the processes, trains two steps in float32 and
measures the second. It prints a Markdown table per model; each figure is the maximum over the ranks.
"""

from __future__ import annotations

import os
import sys

from components.config.errors import ConfigError
from components.config.shape import read_shape
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.failures import tell_problems
from components.terminal import print_text
from scripts._memory.options import models_to_measure, read_options
from scripts._memory.table import shapes_of, table

STATE_SEQ, STATE_MICRO_BATCHES = 128, 4
"""Tokens per row and rows per step for all axes but cp, which is measured on one row of --seq tokens."""


def main() -> int:
    """Compose the configs, measure and print the tables. Config errors are reported before torch is imported."""
    # The allocator warns about frees of memory that was allocated before profiling started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        options, overrides = read_options(sys.argv[1:], __doc__)
        measured = models_to_measure(overrides)
        lines = []
        for name, cfg in measured.items():
            from scripts._memory.ranks import Load, measure_all

            shapes = shapes_of(options.degrees, options.seq, bool(read_shape(cfg).experts))
            loads = {True: Load(options.seq), False: Load(STATE_SEQ, STATE_MICRO_BATCHES)}
            figures = measure_all(cfg, {each.name: (each.parallelism, loads[each.long], each.world) for each in shapes})
            lines += [
                f"{name}, MiB, maximum over the ranks (fraction of a single process):",
                "",
                *table(shapes, figures),
                "",
            ]
            print_text("\n".join(lines[-len(shapes) - 5 :]), flush=True)
    except ConfigError as error:
        tell_problems(error.problems)
        return EXIT_INVALID
    if options.out is not None:
        options.out.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
