"""Rank the meshes that can run a recipe: which fit into the memory, and how long a step takes.

python scripts/plan.py model=llama3_1_8b cluster=slurm_1node cluster.gpu=h100_80 training.seq_len=8192 \\
    training.global_batch_size=64
python scripts/plan.py experiment=llama3_3_70b_8node                          # the sizes of a ready experiment
python scripts/plan.py experiment=llama3_3_70b_8node --why 2                  # every term of row 2
python scripts/plan.py experiment=qwen3_30b_a3b_8node --left-out              # why other meshes are left out
python scripts/plan.py experiment=llama3_1_8b_1node --draw mesh.svg           # a picture of row 1
python scripts/plan.py experiment=llama3_1_8b_1node --dry-run 2               # also simulate the best two rows
python scripts/plan.py --recipe dpo data.path=pairs.jsonl peft=lora model=llama3_1_8b cluster=slurm_1node \\
    cluster.gpu=a100_80 training.seq_len=2048 training.global_batch_size=64
python scripts/plan.py --measure                                              # this GPU or CPU, for cluster.gpu

Takes the recipe's own overrides. A degree, policy, schedule or micro-batch size that they set is kept; the planner
chooses the others. No run is started. `64 of 1` are a rank's micro-batches in a step, and the rows (or pairs) of each.
Memory is that of the fullest rank; tokens/s and MFU count every token of a row. Row `2=1` is as fast as row 1 within
the error of the estimates. Memory and time are closed formulas, which load neither torch nor the model; --dry-run N
simulates a step of the best N rows with fake tensors, on one CPU and without its memory. Exit status 0: at least one
mesh fits; 2: invalid options, an unknown device or model, or nothing fits.

--measure takes less than a minute. It writes conf/local/gpu/NAME.yaml, by default cpu_measured or h100_measured, with
the source of each value, and exits with status 1 if measuring fails and 2 if the name is invalid or the file exists.
The network between nodes is not measured. Measuring GPUs has not been tested on GPUs yet.
"""

from __future__ import annotations

import sys

from components.planning.simulation import simulate_run
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.terminal import exit_with, print_text
from scripts._plan.device_file import write_measured_device
from scripts._plan.options import read_options, read_request
from scripts._plan.report import (
    as_json,
    left_out_lines,
    simulated_lines,
    size_warnings,
    table_lines,
    why_lines,
    write_drawing,
)


def main(arguments: list[str]) -> int:
    """Print the table, or what the options select."""
    try:
        options, overrides = read_options(arguments, __doc__)
        if options.measure is not None:
            return write_measured_device(options.measure or None, force=options.force)
        request = read_request(options, overrides)
        if request is None:
            return 0
        plans = request.plans()
        rows = plans[: request.options.dry_run]
        simulated = [simulate_run(request.planned(row), request.shape, request.choice.world) for row in rows]
        if request.options.draw is not None:
            write_drawing(request, plans)
        if request.options.json:
            print_text(as_json(request, plans, simulated))
            for line in size_warnings(request, plans[0]):
                print_text(line, file=sys.stderr)
        elif request.options.why is not None:
            print_text(*why_lines(request, plans), sep="\n")
        elif request.options.left_out:
            print_text(*left_out_lines(request, plans), sep="\n")
        else:
            print_text(*table_lines(request, plans), *(simulated_lines(rows, simulated) if simulated else ()), sep="\n")
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    return 0


if __name__ == "__main__":
    exit_with(main)
