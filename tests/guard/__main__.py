"""Record what the recipes compute on this machine, and compare later code with it to the bit.

    python -m tests.guard record FILE     # on the commit to start from
    python -m tests.guard compare FILE    # on a later one; exit 1 and a line per difference
    python -m tests.guard compare FILE --run pp --run moe    # (record FILE --run pp replaces one run of a recording)

A recording holds, for each run of runs.py, the losses, gradient norms and evaluation losses, a hash of the weights and
optimizer state of every checkpoint, and the collectives of a step; and for wrong command lines the exit status and the
keys of the problems. Bits differ between kinds of processors and versions of torch, so a recording says where it was
made, and elsewhere numbers are compared within 1e-6 (float64) or 1e-4.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.config.commands import served
from tests.config.test_wrong_configurations import stand_in
from tests.fuzz.ranks import run_ranks
from tests.guard.lines import wrong_lines
from tests.guard.runs import DOUBLE, RUNS, Run, write_data

SECONDS = 300.0
EXIT_INVALID = 2
COLLECTIVE = re.compile(r"(all_gather|reduce_scatter|all_reduce|all_to_all|broadcast|recv|send)\s+([\d,]+)\s+([\d.]+)$")


def main() -> int:
    """Record, or compare and report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.guard", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", action="append", help="only this run, and no command lines")
    asked = parser.parse_args()
    chosen = [run for run in RUNS if not asked.run or run.name in asked.run]
    if asked.action == "record":
        recording = json.loads(asked.file.read_text()) if asked.run else {"machine": machine(), "runs": {}}
        recording["runs"] |= record_runs(chosen)
        if not asked.run:
            recording["refusals"] = [each for each in refusals(wrong_lines()) if each["status"] == EXIT_INVALID]
        asked.file.write_text(json.dumps(recording, indent=1) + "\n")
        return 0
    expected = json.loads(asked.file.read_text())
    differences = differences_of_runs(expected, record_runs(chosen), expected["machine"] == machine())
    if not asked.run:
        before = expected["refusals"]
        now = refusals([each["arguments"] for each in before])
        differences += [f"{a['arguments']}: {b}, was {a}" for a, b in zip(before, now, strict=True) if a != b]
    print(*differences, f"{len(differences)} differences", sep="\n")
    return int(bool(differences))


def machine() -> dict[str, str]:
    """Return what decides the bits of a sum: the processor, its instructions, and torch."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "processor": model[1] if model else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def record_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Execute runs, one after the other, and return what each showed by its name."""
    with tempfile.TemporaryDirectory(prefix="meshbook-guard-") as name:
        folder = Path(name)
        write_data(folder)
        found = {}
        for run in runs:
            collectives = []
            if run.begun:
                shutil.copytree(Path(__file__).parent / run.begun, folder / run.name)
            for command in range(len(run.commands)):
                arguments = run.arguments(command)
                (size,) = (int(each.split("=")[1]) for each in arguments if each.startswith("cluster.procs_per_node="))
                status, output = run_ranks(arguments, size, folder, SECONDS)
                if status != 0:
                    raise RuntimeError(f"{' '.join(arguments)}\nended with status {status}:\n{output[-4000:]}")
                collectives.append(collectives_of(output))
            found[run.name] = {**read_run(folder / run.name), "collectives": collectives}
            print(run.name, flush=True)
    return found


def collectives_of(output: str) -> list[list[str]]:
    """Return [operation, calls, MiB] of a step as rank 0 printed them, sorted."""
    lines = (re.sub(r"\s+$", "", line) for line in output.splitlines())
    return sorted(list(match.groups()) for line in lines if (match := COLLECTIVE.search(line)))


def read_run(folder: Path) -> dict[str, Any]:
    """Return losses, norms and evaluation losses by step, and a hash for each checkpoint."""
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = {str(line["step"]): [line["loss"], line["grad_norm"]] for line in lines if "loss" in line}
    held_out = [[line["step"], line["eval_loss"]] for line in lines if "eval_loss" in line]
    result = json.loads((folder / "result.json").read_text())
    kept = sorted((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return {
        "steps": steps,
        "held_out": held_out,
        "result": {key: result.get(key) for key in ("status", "steps", "first_loss", "last_loss", "eval_loss")},
        "checkpoints": {each.name: hash_of_tensors(each) for each in kept},
    }


def hash_of_tensors(folder: Path) -> str:
    """Return a hash of every tensor of a checkpoint, with its file and its name."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in sorted(tensors.keys()):
                values = tensors.get_tensor(name)
                sha.update(f"{file.relative_to(folder)} {name} {values.dtype} {values.shape}".encode())
                sha.update(values.tobytes())
    return sha.hexdigest()[:16]


def differences_of_runs(expected: dict[str, Any], found: dict[str, Any], same_machine: bool) -> list[str]:
    """Return a line for each value that is not as it was recorded: to the bit if on the same kind of machine."""
    differences = []
    for name, now in found.items():
        before = expected["runs"][name]
        (overrides,) = (run.overrides for run in RUNS if run.name == name)
        # Elsewhere sums differ in their last bits, and transformers' norms are float32, whose 8th digit then flips.
        bound = 0.0 if same_machine else 1e-6 if DOUBLE in overrides else 1e-4
        for key in before:
            if key == "checkpoints" and not same_machine:
                pairs = [(sorted(before[key]), sorted(now[key]))]
            else:
                pairs = [(before[key], now[key])]
            differences += [f"{name} {key}: {b}, was {a}" for a, b in pairs if not _equal(a, b, bound)]
    return differences


def _equal(before: Any, now: Any, bound: float) -> bool:
    if isinstance(before, float) and isinstance(now, float):
        return before == now or abs(before - now) <= bound * abs(before)
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_equal(before[key], now[key], bound) for key in before)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(_equal(a, b, bound) for a, b in zip(before, now, strict=True))
    return bool(before == now)


def refusals(lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run command lines of a recipe that does nothing; return their exit status and the keys of their problems."""
    found = []
    with tempfile.TemporaryDirectory(prefix="meshbook-guard-") as name, served() as commands:
        recipe, empty = stand_in(Path(name), "finetune", "FinetuneConfig"), Path(name) / "empty"
        empty.mkdir()
        for line in lines:
            ended = commands.run(recipe, line, empty, FUZZ_VALUE="x")
            problems = ended.errors.splitlines()
            problems = problems[1:] if len(problems) > 1 else problems
            keys = sorted(re.split(r"[=: ]", problem.strip().lstrip("+~"), maxsplit=1)[0] for problem in problems)
            found.append({"arguments": list(line), "status": ended.status, "keys": keys})
    return found


if __name__ == "__main__":
    sys.exit(main())
