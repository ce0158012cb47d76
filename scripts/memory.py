"""What each mesh axis does to the memory of a rank, measured on gloo processes of this machine.

python scripts/memory.py                                    # a Llama and a Qwen3-MoE of 100 MB, made from scratch
python scripts/memory.py model=smollm2_135m --degrees 2     # a model of yours, two ranks of each axis
python scripts/memory.py model=tiny --seq 512 --out memory.md

Takes the model options of recipes/finetune.py. Trains two steps in float32 per mesh, in processes that only this
script starts, and prints a Markdown table per model. Each figure is the largest over the ranks.
"""

from __future__ import annotations

import os
import sys

from components.config.errors import ConfigError
from components.config.shape import read_shape
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.failures import print_problems
from components.terminal import print_text
from scripts._memory.options import models_to_measure, read_options
from scripts._memory.table import shapes_of, table

STATE_SEQ, STATE_MICRO_BATCHES = 128, 4
"""Tokens and rows of a step for every axis but cp, which is measured on rows of --seq tokens, one at a time."""


def main() -> int:
    """Compose, measure, print; config errors are reported before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the allocator warns of what was there before it was watched
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
            lines += [f"{name}, MiB of the rank that has most (part of one process):", "", *table(shapes, figures), ""]
            print_text("\n".join(lines[-len(shapes) - 5 :]), flush=True)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    if options.out is not None:
        options.out.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
