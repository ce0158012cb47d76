"""Checks of Meshbook on GPUs, in at most 10 minutes, without a network and with random weights.

python scripts/gpu.py                          # make gpu: every check; outputs/gpu/verdict.md and verdict.json
python scripts/gpu.py --ranks 8                # make gpu8: what only several GPUs show; outputs/gpu8
python scripts/gpu.py --only loss,compiled     # some of them
python scripts/gpu.py --device cpu --small     # tiny models on a CPU: whether the checks themselves work

Each line of the result has the measured figure, the predicted one, the bound, and PASS, SLOW, FAIL or SKIP. A check
runs in a process of its own; one that fails or takes more than twice its time does not stop the others. The verdict is
written after each check. Exit status: 1 if a line is FAIL, else 0; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from components.launch.machine import visible_gpus
from components.terminal import exit_with
from scripts._gpu.checks import SECONDS, SEVERAL_SECONDS
from scripts._gpu.verdict import Line, Verdict, as_json, as_markdown, failed

REPOSITORY = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Run the checks selected on the command line, and write the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = f"{', '.join(SECONDS)}; with --ranks of {', '.join(SEVERAL_SECONDS)}"
    parser.add_argument("--only", help=f"checks, of {every} (default: all)")
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models: only whether the checks work")
    parser.add_argument("--out", type=Path, help="folder of the verdict (default: outputs/gpu, outputs/gpu8)")
    options = parser.parse_args(arguments)
    options.out = options.out or Path("outputs") / f"gpu{options.ranks if options.ranks > 1 else ''}"
    offered = SECONDS if options.ranks == 1 else SEVERAL_SECONDS
    names = options.only.split(",") if options.only else list(offered)
    if unknown := [name for name in names if name not in offered]:
        parser.error(f"--only={','.join(unknown)}: no such check; choose some of {', '.join(offered)}")
    if options.ranks < 1:
        parser.error(f"--ranks={options.ranks}: must be at least 1")
    if options.device == "cuda" and (gpus := visible_gpus(os.environ)) < options.ranks:
        parser.error(
            f"--ranks={options.ranks}: {gpus or 'no'} GPU{'s are' if gpus > 1 else ' is'} visible; run it on a machine "
            "with as many, or add --device cpu --small to try the checks"
        )
    began, lines = time.monotonic(), []
    for name in names:
        for line in run_check(name, options.device, options.ranks, options.small):
            lines.append((name, line))
            print(f"{line.verdict:4}  {name}: {line.what}: {line.measured} ({line.bound})", flush=True)
        summary = write_verdict(options.out, lines, time.monotonic() - began)
    print(f"{summary}: {options.out / 'verdict.md'}")
    return int(any(line.verdict is Verdict.FAIL for _, line in lines))


def write_verdict(folder: Path, lines: list[tuple[str, Line]], seconds: float) -> str:
    """Write verdict.md and verdict.json into a folder; return a summary."""
    counts = {str(verdict): sum(line.verdict is verdict for _, line in lines) for verdict in Verdict}
    facts = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "seconds": round(seconds), **counts}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f" in {seconds:.0f} s"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verdict.md").write_text(as_markdown(lines, f"{summary}, {facts['date']}"))
    (folder / "verdict.json").write_text(json.dumps(as_json(lines, facts), indent=1) + "\n")
    return summary


def run_check(name: str, device: str, ranks: int, small: bool) -> Iterator[Line]:
    """Yield the lines of a check that runs in a process of its own; a last one if it fails or takes too long."""
    command = [sys.executable, "-m", "scripts._gpu.checks", name, device, str(ranks), "small" if small else "full"]
    seconds = (SECONDS if ranks == 1 else SEVERAL_SECONDS)[name]
    limit = (10 if small else 2) * seconds  # small ones also run on a slow CPU
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, process_group=0
    ) as check:
        try:
            output, errors = check.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(check.pid, 9)
            output, errors = check.communicate()
            errors = f"killed after {limit} s: it should take {seconds} s"
    for text in output.splitlines():
        if text.startswith('{"what"'):
            values = json.loads(text)
            yield Line(**{**values, "verdict": Verdict(values["verdict"])})
    if check.returncode:
        yield failed("ended early", (errors.strip().splitlines() or ["no message"])[-1])


if __name__ == "__main__":
    exit_with(main)
