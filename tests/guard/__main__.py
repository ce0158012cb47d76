"""Record what the recipes compute on this machine, and compare later code with it bit by bit.

    python -m tests.guard record FILE     # on the base commit
    python -m tests.guard compare FILE    # on a later commit; exit 1 and a line per difference
    python -m tests.guard compare FILE --run pp --run moe    # (record FILE --run pp replaces one run in a recording)

A recording contains, for each run in runs.py, the losses, gradient norms and eval losses, a hash of the weights and
optimizer state of every checkpoint, and the collectives of a step. For random invalid command lines it contains the
exit status and the keys of the problems; those of tests/config/wrong_lines.txt are read from there. Results differ in
their last bits between processor types and torch versions, so a recording stores its machine, and on other machines
numbers are compared within 1e-6 (float64) or 1e-4.
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

from tests.config.commands import placeholder_recipe, served
from tests.config.random_lines import wrong_line
from tests.config.test_wrong_configurations import SETUPS
from tests.config.wrong_lines import wrong_lines
from tests.fuzz.ranks import run_ranks
from tests.guard.runs import DOUBLE, RUNS, Run, write_data

SECONDS = 300.0
RANDOM_LINES = range(7_000_000, 7_000_060)
"""Seeds of the random invalid command lines."""
EXIT_INVALID = 2
COLLECTIVE = re.compile(r"(all_gather|reduce_scatter|all_reduce|all_to_all|broadcast|recv|send)\s+([\d,]+)\s+([\d.]+)$")


def main() -> int:
    """Record, or compare and report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.guard", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", action="append", help="only this run, without the invalid command lines")
    options = parser.parse_args()
    chosen = [run for run in RUNS if not options.run or run.name in options.run]
    if options.action == "record":
        recording = json.loads(options.file.read_text()) if options.run else {"machine": machine(), "runs": {}}
        recording["runs"] |= record_runs(chosen)
        if not options.run:
            recording["refusals"] = refusals([wrong_line(seed).arguments for seed in RANDOM_LINES])
        options.file.write_text(json.dumps(recording, indent=1) + "\n")
        return 0
    expected = json.loads(options.file.read_text())
    differences = differences_of_runs(expected, record_runs(chosen), expected["machine"] == machine())
    if not options.run:
        before = listed_refusals() + expected["refusals"]
        now = refusals([each["arguments"] for each in before])
        differences += [f"{a['arguments']}: {b}, was {a}" for a, b in zip(before, now, strict=True) if a != b]
    print(*differences, f"{len(differences)} differences", sep="\n")
    return int(bool(differences))


def machine() -> dict[str, str]:
    """Return what determines the exact result of a sum: processor, instruction set, torch version."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "processor": model[1] if model else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def record_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Execute the runs one after the other; return their results by name."""
    with tempfile.TemporaryDirectory(prefix="meshbook-guard-") as name:
        folder = Path(name)
        write_data(folder)
        found = {}
        for run in runs:
            collectives = []
            if run.resumes_from:
                shutil.copytree(Path(__file__).parent / run.resumes_from, folder / run.name)
            for command in range(len(run.commands)):
                arguments = run.arguments(command)
                (size,) = (int(each.split("=")[1]) for each in arguments if each.startswith("cluster.procs_per_node="))
                status, output = run_ranks(arguments, size, folder, SECONDS)
                if status != 0:
                    raise RuntimeError(f"{' '.join(arguments)}\nexited with status {status}:\n{output[-4000:]}")
                collectives.append(collectives_of(output))
            found[run.name] = {**read_run(folder / run.name), "collectives": collectives}
            print(run.name, flush=True)
    return found


def collectives_of(output: str) -> list[list[str]]:
    """Return the sorted [operation, calls, MiB] of a step from the output of rank 0."""
    lines = (re.sub(r"\s+$", "", line) for line in output.splitlines())
    return sorted(list(match.groups()) for line in lines if (match := COLLECTIVE.search(line)))


def read_run(folder: Path) -> dict[str, Any]:
    """Return losses, norms and eval losses by step, and a hash of each checkpoint."""
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
    """Return a hash over all tensors of a checkpoint, including their files and names."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in sorted(tensors.keys()):
                values = tensors.get_tensor(name)
                sha.update(f"{file.relative_to(folder)} {name} {values.dtype} {values.shape}".encode())
                sha.update(values.tobytes())
    return sha.hexdigest()[:16]


def differences_of_runs(expected: dict[str, Any], found: dict[str, Any], same_machine: bool) -> list[str]:
    """Return a line for each value that differs from the recording, compared bit by bit on the same machine type."""
    differences = []
    for name, now in found.items():
        before = expected["runs"][name]
        (overrides,) = (run.overrides for run in RUNS if run.name == name)
        # On other machines sums differ in their last bits; transformers' norms are float32 and differ in the 8th digit.
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


def listed_refusals() -> list[dict[str, Any]]:
    """Return the command lines of wrong_lines.txt that need no files, with the key that each message begins with."""
    rows = [row for row in wrong_lines() if row.group not in SETUPS]
    arguments = [[*row.line.split(" "), *([] if "model=" in row.line else ["model=tiny"])] for row in rows]
    keys = [[key_of(row.parts[0])] for row in rows]
    return [{"arguments": a, "status": EXIT_INVALID, "keys": b} for a, b in zip(arguments, keys, strict=True)]


def key_of(problem: str) -> str:
    """Return the key that a problem begins with."""
    return re.split(r"[=: ]", problem.strip().lstrip("+~"), maxsplit=1)[0]


def refusals(lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run command lines of a recipe with an empty main; return their exit status and the keys of their problems."""
    found = []
    with tempfile.TemporaryDirectory(prefix="meshbook-guard-") as name, served() as commands:
        recipe, empty = placeholder_recipe(Path(name), "finetune", "FinetuneConfig"), Path(name) / "empty"
        empty.mkdir()
        for line in lines:
            ended = commands.run(recipe, line, empty, FUZZ_VALUE="x")
            problems = ended.errors.splitlines()
            problems = problems[1:] if len(problems) > 1 else problems
            found.append({"arguments": list(line), "status": ended.status, "keys": sorted(map(key_of, problems))})
    return found


if __name__ == "__main__":
    sys.exit(main())
