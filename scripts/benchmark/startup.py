"""Start-up time: imports, rejection of a config error, a run of one step.

python scripts/benchmark/startup.py               # median and minimum of 5 interleaved starts each
python scripts/benchmark/startup.py --repeats 15

Wall and processor seconds of whole processes, started one after the other. Importing torch and the Trainer is measured
for comparison. On a machine that other processes use too, the minimum is more reliable than the median.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from components.terminal import HelpText, fit

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = str(ROOT / "recipes" / "finetune.py")
TINY = ("experiment=smoke", "training.max_steps=1", "data.max_samples=16", "data.max_eval_samples=4", "data.cache=null",
        "checkpoint.last=false", "checkpoint.export=false", "generation.samples=0", "logging.plot=false",
        "cluster.device=cpu")  # fmt: skip
STARTS = {
    "python -c pass": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "from transformers import Trainer": ("-c", "from transformers import Trainer"),
    "an unknown key is rejected": (FINETUNE, "training.max_step=3"),
    "the composed config is printed": (FINETUNE, "--cfg", "job"),
    "a complete run: tiny model, one step, two evaluations": (FINETUNE, *TINY),
    "the same on two processes, fsdp2": (FINETUNE, *TINY, "cluster=local_2proc"),
}
REJECTED = "an unknown key is rejected"
"""The only start whose expected exit status is 2."""


def main() -> None:
    """Print a table of medians and minimums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = max(1, parser.parse_args().repeats)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    loads = []
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        for number in range(repeats + 1):  # the first round fills the file and bytecode caches, and is not counted
            loads.append(os.getloadavg()[0])
            for name, arguments in STARTS.items():
                taken[name].append(start(arguments, folder, 2 if name == REJECTED else 0))
            print(f"{number} of {repeats} done, load {loads[-1]:.1f}", file=sys.stderr)
    lines = ["| start | wall s (minimum) | processor s (minimum) |", "|---|---|---|"]
    for name, times in taken.items():
        wall, processor = zip(*times[1:], strict=True)
        cells = (f"{statistics.median(values):.2f} ({min(values):.2f})" for values in (wall, processor))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print(fit("\n".join(lines)))
    print(
        f"\nMedians of {repeats} starts on {os.cpu_count()} cores, load average {min(loads):.1f} to {max(loads):.1f}."
    )


def start(arguments: tuple[str, ...], folder: str, expected: int) -> tuple[float, float]:
    """Run python with `arguments`; return wall and processor seconds, including those of its child processes.

    Raises SystemExit if the exit status is not `expected`, because a failed run would count as a fast one.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode != expected:
        raise SystemExit(f"{' '.join(command)}: exit status {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
