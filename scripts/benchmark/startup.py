"""How long a person waits before anything happens: imports, refusals, the first step.

python scripts/benchmark/startup.py               # medians of 5 starts each, taking turns, and the least of them
python scripts/benchmark/startup.py --repeats 15

Wall and processor seconds of whole processes, one after the other. Beside ours stands what anybody pays who imports
torch, or the Trainer. Of a machine that others use too, the least says more than the median.
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

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = str(ROOT / "recipes" / "finetune.py")
TINY = ("experiment=smoke", "training.max_steps=1", "data.max_samples=16", "data.max_eval_samples=4", "data.cache=null",
        "checkpoint.last=false", "checkpoint.export=false", "generation.samples=0", "logging.plot=false",
        "cluster.device=cpu")  # fmt: skip
STARTS = {
    "python -c pass": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "from transformers import Trainer": ("-c", "from transformers import Trainer"),
    "a wrong key is refused": (FINETUNE, "training.max_step=3"),
    "the composed config is shown": (FINETUNE, "--cfg", "job"),
    "a whole run: tiny model, one step, two evaluations": (FINETUNE, *TINY),
    "the same on two processes, fsdp2": (FINETUNE, *TINY, "cluster=local_2proc"),
}
REFUSED = "a wrong key is refused"
"""The one start that ends with status 2."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = max(1, parser.parse_args().repeats)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    loads = []
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        for number in range(repeats + 1):  # the first fills the caches of files and bytecode, and is not counted
            loads.append(os.getloadavg()[0])
            for name, arguments in STARTS.items():
                taken[name].append(start(arguments, folder, 2 if name == REFUSED else 0))
            print(f"{number} of {repeats} done, load {loads[-1]:.1f}", file=sys.stderr)
    print("| start | wall s (least) | processor s (least) |\n|---|---|---|")
    for name, times in taken.items():
        wall, processor = zip(*times[1:], strict=True)
        cells = (f"{statistics.median(values):.2f} ({min(values):.2f})" for values in (wall, processor))
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nMedians of {repeats} starts on {os.cpu_count()} cores, load {min(loads):.1f} to {max(loads):.1f}.")


def start(arguments: tuple[str, ...], folder: str, expected: int) -> tuple[float, float]:
    """Run python with `arguments`; return wall and processor seconds, its children's included.

    Ends this program where it does not exit with the status `expected`: a run that was refused is fast.
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
