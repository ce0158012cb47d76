"""Training throughput and memory of Meshbook and of alternative frameworks on the same workload.

python scripts/benchmark/compare.py full_packed                       # GPU: Llama 3.2 1B; without one: tiny, on a CPU
python scripts/benchmark/compare.py full_packed --precision bfloat16  # includes torchtune
python scripts/benchmark/compare.py sft_packed_vs_padded              # Meshbook packed, the Trainer padded and packed
python scripts/benchmark/compare.py lora                              # 8B, rank 16, all linear layers
python scripts/benchmark/compare.py full_bf16                         # 8B, pure bfloat16
scripts/benchmark/setup_arms.sh                                       # install the other libraries
python scripts/benchmark/compare.py full_packed --arms meshbook,loop,litgpt --python litgpt=/venvs/litgpt/bin/python
python scripts/benchmark/compare.py full_packed -- model.compile=true # options after -- are overrides of the recipe

An arm is one framework. Every arm trains the same model from the same random weights on the same micro-batches, which
are written to a folder once, without network access. Clipping, AdamW, learning rate and dtypes are the same. In every
round each arm trains once, in a process of its own; its first steps are warm-up and not measured. The report has
medians over the rounds, and ratios of arms in the same round. Time is wall time on CUDA, and processor time on a CPU,
which other processes may use too. An arm runs in the environment that setup_arms.sh made for it, if there is one, and
else in Meshbook's own; --python names another one.

The script verifies that all arms train the same. An arm is VOID if its losses differ from those of a bare PyTorch loop
by more than the bound in the first 50 steps of any round (later, rounding has grown too much for a comparison), or if
its optimizer trains a different number of parameters, in another dtype, or with other settings. The bounds are
relative: 1e-5 in float32, 5e-3 in bfloat16. Verify a new arm in float32 first.

Targets on a 141 GB GPU (not measured yet): full_packed 1.10 x the best peer and 57,000 tokens/s;
sft_packed_vs_padded 3 x the padded Trainer; lora 16,500 and full_bf16 13,000 tokens/s; 0.9 x the best peer's memory.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from components.terminal import HelpText
from scripts.benchmark.compare_report import FLOAT32_BOUND, Arm, Report, Turn
from scripts.benchmark.peers.make import SHAPES, make
from scripts.benchmark.peers.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "loop"


@dataclass(frozen=True)
class Task:
    """A workload and the arms that train it."""

    size: str
    """Model size on CUDA; on a CPU it is tiny."""
    precision: str
    """Precision on CUDA; on a CPU it is float32, except for full_bf16."""
    arms: dict[str, str]
    """Arm -> layout of its rows."""
    lora_rank: int = 0
    lr: float = 1e-3
    """Learning rate of the tiny model; larger models use a tenth of it."""


ROWS = dict.fromkeys(("meshbook", "loop", "trainer", "torchtune", "litgpt", "torchtitan", "automodel"), "rows")
WITHOUT_ADAPTERS = ("litgpt", "torchtitan", "automodel")
"""Arms that do not train the common adapters."""
ARMS = ROOT / "outputs" / "benchmark" / "arms"
"""Environments that setup_arms.sh made: ARMS/ARM."""
SFT = {"meshbook": "packed", "loop": "packed", "trainer_packed": "packed", "trainer_padded": "padded"}
TASKS = {
    "full_packed": Task("1b", "mixed", ROWS),
    "sft_packed_vs_padded": Task("1b", "mixed", SFT),
    "lora": Task(
        "8b", "bfloat16", {name: layout for name, layout in ROWS.items() if name not in WITHOUT_ADAPTERS}, lora_rank=16
    ),
    "full_bf16": Task("8b", "bfloat16", ROWS),
}
BATCHES = {"tiny": (128, 4, 2), "1b": (4096, 8, 4), "8b": (4096, 4, 2)}
"""Model size -> tokens per row, rows per step, rows per micro-batch."""
MODULES = {"trainer_packed": "trainer", "trainer_padded": "trainer"}
"""Arm -> its module in peers/, if the names differ."""


def main() -> int:
    """Run all rounds and write the report; return 0 if no arm is void and Meshbook was measured."""
    options = parse(sys.argv[1:])
    task = TASKS[options.task]
    workload = workload_of(task, options)
    make(workload, packed="packed" in task.arms.values())
    arms = [Arm(name) for name in options.arms]
    turns = Turns(workload, task, options)
    loads = [os.getloadavg()[0]]
    turns.reference_precision = options.reference or workload.precision
    first = turns.take(REFERENCE, 1, precision=turns.reference_precision)
    if isinstance(first, str):
        print(f"the reference (a bare PyTorch loop) failed: {first}")
        return 1
    for number in range(1, options.rounds + 1):
        for arm in arms:
            if arm.name == REFERENCE and number == 1 and turns.reference_precision == workload.precision:
                arm.add(first)  # the reference run is the loop's run of the first round
            elif not arm.reason:
                arm.add(turns.take(arm.name, number))
        turns.roof(number)
        loads.append(os.getloadavg()[0])
        print(f"round {number} of {options.rounds}: load {loads[-1]:.1f}", flush=True)
    report = Report(
        command=shlex.join(["python", "scripts/benchmark/compare.py", *sys.argv[1:]]),
        workload=replace(workload, layout="rows"),
        reference=first,
        bound=FLOAT32_BOUND if turns.reference_precision == workload.precision == "float32" else 5e-3,
        arms=arms,
        roofs=turns.roofs,
        notes=[f"load average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores"],
    )
    return report.finish(options.out)


def parse(arguments: list[str]) -> Namespace:
    """Return the options; `overrides` are the arguments after --."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser("compare.py", description=__doc__, formatter_class=HelpText)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--arms", help="comma-separated; default: all arms of the task")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each run that are not measured, at least 1")
    parser.add_argument("--size", choices=SHAPES)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--precision", choices=("float32", "mixed", "bfloat16"))
    parser.add_argument(
        "--reference", choices=("float32", "bfloat16"), help="precision of the reference loop; default: --precision"
    )
    parser.add_argument("--compile", action="store_true", help="compile the model as each framework does")
    parser.add_argument("--micro", type=int, help="rows per micro-batch")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--timeout", type=float, default=1800, help="time limit of a run in seconds")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ARM=PYTHON",
        help="interpreter of an arm (default: that of setup_arms.sh)",
    )
    parser.add_argument("--out", type=Path, help="default: outputs/benchmark/compare/TASK-SIZE-DEVICE")
    options = parser.parse_args(arguments[:cut])
    options.overrides = tuple(arguments[cut + 1 :])
    task = TASKS[options.task]
    offered = list(task.arms)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.size = options.size or (task.size if options.device == "cuda" else "tiny")
    names = options.arms.split(",") if options.arms else offered
    options.arms = [arm for name in names for arm in offered if arm == name or MODULES.get(arm) == name]
    if missing := [
        name for name in names if not {name, *(k for k in offered if MODULES.get(k) == name)} & set(offered)
    ]:
        parser.error(f"--arms: {options.task} has no {', '.join(missing)}; it has {', '.join(offered)}")
    if min(options.rounds, options.steps, options.warmup) < 1:
        parser.error("--rounds, --steps and --warmup must be at least 1")
    if wrong := [each for each in options.python if each.partition("=")[0] not in offered or "=" not in each]:
        parser.error(f"--python {wrong[0]}: must be ARM=PYTHON, with one of the arms {', '.join(offered)}")
    options.python = dict(each.split("=", 1) for each in options.python)
    default = ROOT / "outputs/benchmark/compare" / f"{options.task}-{options.size}-{options.device}"
    options.out = (options.out or default).resolve()
    return options


def workload_of(task: Task, options: Namespace) -> Workload:
    """Return the workload that all arms train."""
    seq_len, rows, micro = BATCHES[options.size]
    micro = options.micro or micro
    if rows % micro:
        raise SystemExit(f"--micro {micro}: must divide the {rows} rows per step")
    on_cpu = "bfloat16" if options.task == "full_bf16" else "float32"
    precision = options.precision or (task.precision if options.device == "cuda" else on_cpu)
    untied = task.size == "8b"  # the tiny model on a CPU has untied embeddings if the task's model has
    return Workload(
        folder=str(options.out / "workload"),
        device=options.device,
        precision=precision,
        layout="rows",
        shape=replace(SHAPES[options.size], tied=not untied),
        lora_rank=task.lora_rank,
        seq_len=seq_len,
        rows=rows,
        micro=micro,
        warmup=options.warmup,
        steps=options.steps,
        lr=task.lr if options.size == "tiny" else task.lr / 10,
        compile=options.compile,
        threads=options.threads,
        overrides=options.overrides,
    )


class Turns:
    """Runner of arms: starts their processes and reads their results."""

    def __init__(self, workload: Workload, task: Task, options: Namespace) -> None:
        self._workload, self._task, self._options = workload, task, options
        self._folder = options.out / "turns"
        self.roofs: list[float] = []
        self.reference_precision = workload.precision
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def take(self, name: str, number: int, precision: str | None = None) -> Turn | str:
        """Run an arm once; return its measurements, or the reason of its failure."""
        workload = replace(
            self._workload,
            layout=self._task.arms[name],
            precision=precision or self._workload.precision,
        )
        result = self._run(name, MODULES.get(name, name), number, workload)
        if isinstance(result, str):
            return result
        steps = range(workload.warmup, workload.total_steps)
        return Turn(
            **result,
            cost=result["seconds" if workload.device == "cuda" else "processor_seconds"],
            targets=sum(map(workload.targets, steps)),
            flops=sum(workload.shape.flops(workload.lengths(step), workload.lora_rank) for step in steps),
        )

    def roof(self, number: int) -> None:
        """Measure the throughput of a large matmul."""
        result = self._run("roof", "roof", number, self._workload)
        if not isinstance(result, str):
            self.roofs.append(result["tflops"])

    def _run(self, name: str, module: str, number: int, workload: Workload) -> dict | str:
        stem = f"{number}-{name}-{workload.precision}"
        files = {end: self._folder / f"{stem}.{end}" for end in ("workload.json", "result.json", "log")}
        workload.write(files["workload.json"])
        own = ARMS / module / "bin" / "python"
        python = self._options.python.get(name, str(own) if own.exists() else sys.executable)
        command = [python, "-m", f"scripts.benchmark.peers.{module}", *map(str, list(files.values())[:2])]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(workload.threads))
        one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the Trainer uses all visible GPUs
        variables = {**threads, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": one_gpu}
        with files["log"].open("w") as log:
            try:
                ended = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | variables,
                    stdout=log,
                    stderr=log,
                    timeout=self._options.timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"timed out after {self._options.timeout:g} s (--timeout)"
            except OSError as error:
                return str(error)
        if ended.returncode:
            lines = [line.strip() for line in files["log"].read_text().splitlines() if line.strip()]
            return f"exit status {ended.returncode}" + (f": {lines[-1]}" if lines else "")
        return json.loads(files["result.json"].read_text())


if __name__ == "__main__":
    sys.exit(main())
