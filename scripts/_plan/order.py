"""Order of eight meshes by the planner's predicted step time, compared with a measured sweep on this machine's CPU.

python -m scripts._plan.order                     # measure the CPU, then run two ranks on eight meshes
python -m scripts._plan.order --gpu cpu_measured  # an existing device file
python -m scripts._plan.order --ranks 4 --steps 30

Pretrains model=llama_2m without evaluation, generation and checkpoints. Prints measured and predicted seconds per step,
and Spearman's rank correlation. The formulas assume a core per rank: more ranks than cores fill each other's pipeline
bubbles, which is not predicted. Other programs on the machine disturb the order. Exit status 1: below --least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from components.terminal import HelpText

ROOT = Path(__file__).resolve().parents[2]
MESHES = {
    2: ("ddp", "fsdp2", "fsdp2_tp2", "fsdp2_tp2_sp", "fsdp2_cp2", "pp2_1f1b", "pp2_interleaved", "pp2_zbv"),
    4: ("ddp", "fsdp2", "hsdp", "fsdp2_tp2", "fsdp2_cp2", "pp2_1f1b", "tp4", "pp4_1f1b"),
}
"""Ranks -> options of conf/parallelism."""


def main() -> int:
    """Print the table and the correlation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--gpu", metavar="NAME", help="device file, cluster.gpu (default: measure it now)")
    parser.add_argument("--ranks", type=int, choices=list(MESHES), default=2)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: 20)")
    parser.add_argument("--least", type=float, default=0.8, help="lowest accepted correlation (default: 0.8)")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps {options.steps}: must be at least 4, since the first two are not timed")
    if options.gpu is None:
        options.gpu = "cpu_plan_order"  # its own file, so that --force replaces none of the user's
        command = [sys.executable, str(ROOT / "scripts" / "plan.py"), "--measure", options.gpu, "--force"]
        if status := subprocess.run(command, check=False).returncode:
            return status
    with tempfile.TemporaryDirectory(prefix="plan-order-") as folder:
        rows = [run(mesh, options, Path(folder) / mesh) for mesh in MESHES[options.ranks]]
    print("| parallelism | measured s | predicted s | predicted / measured |\n|---|---|---|---|")
    for mesh, measured, predicted in sorted(rows, key=lambda row: row[1]):
        print(f"| {mesh} | {measured:.3g} | {predicted:.3g} | {predicted / measured:.2f} |")
    correlation = rank_correlation([row[1] for row in rows], [row[2] for row in rows])
    print(f"\nSpearman's rank correlation: {correlation:.2f} (accepted: at least {options.least:g})")
    return int(correlation < options.least)


def run(mesh: str, options: argparse.Namespace, run_dir: Path) -> tuple[str, float, float]:
    """Run a mesh; return its name, and the measured and predicted seconds per step. Raises SystemExit if it fails."""
    command = [
        sys.executable, str(ROOT / "recipes" / "pretrain.py"), f"parallelism={mesh}", "model=llama_2m",
        "experiment=bench_mesh", "cluster.device=cpu", f"cluster.procs_per_node={options.ranks}",
        f"cluster.gpu={options.gpu}", f"run.dir={run_dir}", f"training.max_steps={options.steps}",
        "training.log_every=2", "training.micro_batch_size=4", "data.max_samples=300", "data.max_eval_samples=4",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {ended.returncode}\n{ended.stdout}{ended.stderr}")
    result = json.loads((run_dir / "result.json").read_text())
    print(f"{mesh}: {result['step_seconds']:.3g} s per step", file=sys.stderr)
    return mesh, result["step_seconds"], result["planned"]["step_seconds"]


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation of two lists of the same length; equal values share their mean rank."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: list[float]) -> list[float]:
    """Return the rank of each value, from 0."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


if __name__ == "__main__":
    sys.exit(main())
