"""Rank the meshes that can run a recipe: which fit into the memory, and how long a step takes.

python scripts/plan.py model=llama3_1_70b cluster=slurm_8node cluster.gpu=h100_80 training.global_batch_size=128
python scripts/plan.py model=llama3_1_8b cluster=slurm_1node cluster.gpu=h100_80 --why 1
python scripts/plan.py --recipe dpo data.path=pairs.jsonl peft=lora cluster=slurm_1node cluster.gpu=a100_80
python scripts/plan.py model=llama3_1_8b cluster=slurm_1node cluster.gpu=h100_80 --dry-run 2
python scripts/plan.py model=llama3_1_8b cluster=slurm_1node cluster.gpu=h100_80 --draw mesh.svg
python scripts/plan.py model=qwen3_30b_a3b cluster=slurm_2node cluster.gpu=h200 parallelism.ep=8 --left-out

Takes the recipe's own overrides. A degree, policy, schedule or micro-batch size that they set is kept; the planner
chooses the others. No run is started. Memory and time are closed formulas, which load neither torch nor the model;
--dry-run N simulates a step of the best N rows with fake tensors, on one CPU and without its memory. Exit status 0:
at least one mesh fits; 2: invalid options, an unknown device or model, or nothing fits.
"""

from __future__ import annotations

from components.config.errors import ConfigError
from components.planning.dry_run.played_run import play_run
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.failures import print_problems
from components.terminal import exit_with, print_text
from scripts._plan.drawing import write_drawing
from scripts._plan.options import read_request
from scripts._plan.report import as_json, left_out_lines, played_lines, table_lines, why_lines


def main(arguments: list[str]) -> int:
    """Print the table, or what the options select."""
    try:
        request = read_request(arguments, __doc__)
        if request is None:
            return 0
        plans = request.plans()
        rows = plans[: request.options.dry_run]
        played = [play_run(request.planned(each), request.shape, request.choice.world) for each in rows]
        if request.options.draw is not None:
            write_drawing(request, plans)
        if request.options.json:
            print_text(as_json(request, plans, played))
        elif request.options.why is not None:
            print_text(*why_lines(request, plans), sep="\n")
        elif request.options.left_out:
            print_text(*left_out_lines(request, plans), sep="\n")
        else:
            print_text(*table_lines(request, plans), *(played_lines(rows, played) if played else ()), sep="\n")
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    return 0


if __name__ == "__main__":
    exit_with(main)
