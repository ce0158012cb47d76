"""Checks of Meshbook on GPUs, in at most 420 seconds, without a network and with random weights.

python scripts/gpu.py                          # make gpu: results are right, then speed and memory; outputs/gpu
python scripts/gpu.py --only kernels,memory    # some of the checks, also those that do not run by default
python scripts/gpu.py --ranks 8                # make gpu8: what only several GPUs show; outputs/gpu8
python scripts/gpu.py --device cpu --small     # tiny models on a CPU: whether the checks themselves work

Each line of the result has the measured figure, the predicted one, the bound, and PASS, SLOW, FAIL or SKIP. A line that
begins with "control" shows how far a planted fault is from the bound. A check runs in a process of its own; one that
fails or takes more than twice its time does not stop the others. Written at once: results.jsonl (a figure a line),
verdict.md, and log.txt, the complete output with the stacks of a check that hangs. Exit status: 1 if a line is FAIL,
else 0; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from components.launch.local import allocator_defaults, rank_defaults
from components.launch.machine import visible_gpus
from components.protocol.run_files import is_replaceable
from components.terminal import HelpText, exit_with
from scripts._gpu.checks import MORE_SECONDS, NEEDS_GPU, SECONDS, SEVERAL_SECONDS
from scripts._gpu.verdict import HEAD, Verdict, append_line, as_markdown, failed, read_lines, skipped, summary

REPOSITORY = Path(__file__).resolve().parents[1]
DEADLINE = 420.0
"""Seconds for all checks of one GPU."""
START_SECONDS = 5.0
"""A check is not started with less time left."""
FILES = {"results.jsonl": '"verdict"', "log.txt": "\n===== ", "verdict.md": HEAD}
"""Files that the script replaces, each with a text in its first lines by which it is known."""
STACKS_SECONDS = 2.0
"""Time for a hanging check to print its stacks."""


def main(arguments: list[str]) -> int:
    """Run the checks selected on the command line, and write the results."""
    options = parse(arguments)
    seconds = {**SECONDS, **MORE_SECONDS} if options.ranks == 1 else SEVERAL_SECONDS
    began, results = time.monotonic(), options.out / "results.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (options.out / name).unlink(missing_ok=True)
    for name in options.only:
        known, left = len(read_lines(results)), options.seconds - (time.monotonic() - began)
        run_check(name, options, (6 if options.small else 2) * seconds[name], left)  # a CPU may be slow
        lines = read_lines(results)
        for check, line in lines[known:]:
            print(f"{line.verdict:4}  {check}: {line.what}: {line.measured} ({line.bound})", flush=True)
        text = summary(lines, time.monotonic() - began)
        (options.out / "verdict.md").write_text(as_markdown(lines, f"{text}, {time.strftime('%Y-%m-%d')}"))
    print(f"{text}: {options.out / 'verdict.md'}")
    return int(any(line.verdict is Verdict.FAIL for _, line in lines))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; exit with status 2 and one message if they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    every = f"{', '.join(SECONDS)}, and if named {', '.join(MORE_SECONDS)}; with --ranks {', '.join(SEVERAL_SECONDS)}"
    parser.add_argument("--only", help=f"checks, in this order, of {every}")
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--seconds", type=float, help=f"time limit of all checks (default: {DEADLINE:g} on one GPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, every check: whether the checks work")
    parser.add_argument("--out", type=Path, help="folder of the results (default: outputs/gpu, outputs/gpu8)")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks={options.ranks}: must be at least 1")
    options.out = options.out or Path("outputs") / f"gpu{options.ranks if options.ranks > 1 else ''}"
    default = {**SECONDS, **(MORE_SECONDS if options.small else {})} if options.ranks == 1 else SEVERAL_SECONDS
    offered = {**SECONDS, **MORE_SECONDS} if options.ranks == 1 else SEVERAL_SECONDS
    options.only = options.only.split(",") if options.only else list(default)
    if unknown := [name for name in options.only if name not in offered]:
        parser.error(f"--only={','.join(unknown)}: no such check; choose some of {', '.join(offered)}")
    if options.seconds is None:
        options.seconds = DEADLINE if options.ranks == 1 and not options.small else float("inf")
    if os.path.lexists(options.out) and not options.out.is_dir():
        parser.error(f"--out={options.out}: is not a folder; choose another one")
    found = [name for name in FILES if os.path.lexists(options.out / name)]
    if found and not any(name in found and is_replaceable(options.out / name, mark) for name, mark in FILES.items()):
        parser.error(f"--out={options.out}: {found[0]} exists and is not of this script; choose another folder")
    if options.device == "cuda" and (gpus := visible_gpus(os.environ)) < options.ranks:
        parser.error(
            f"--ranks={options.ranks}: {gpus or 'no'} GPU{'s are' if gpus > 1 else ' is'} visible; run it on a machine "
            "with as many, or add --device cpu --small to try the checks"
        )
    return options


def run_check(name: str, options: argparse.Namespace, limit: float, left: float) -> None:
    """Run a check in a process group of its own, which ends with it, and append a line if it fails or is killed.

    Args:
        limit: Its time limit in seconds; left: the seconds until the time limit of all checks.
    """
    results, log = options.out / "results.jsonl", options.out / "log.txt"
    if options.device == "cpu" and name in NEEDS_GPU:
        append_line(results, name, skipped(name, "needs a GPU"))
        return
    if left < START_SECONDS:
        append_line(results, name, failed("not started", f"{left:.0f} s are left; run it again with --only={name}"))
        return
    size = "small" if options.small else "full"
    command = [sys.executable, "-m", "scripts._gpu.checks", name, options.device, str(options.ranks), size]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    defaults = {**rank_defaults(1), **allocator_defaults(os.environ)}  # as the launcher sets them for ranks
    if options.small:
        defaults["OMP_NUM_THREADS"] = "1"  # threads of tiny models that compete for the cores cost many times as much
    began = time.monotonic()
    with log.open("ab") as output:
        output.write(f"\n===== {name}, at most {min(limit, left):.0f} s =====\n".encode())
        output.flush()
        check = subprocess.Popen(
            [*command, str(results.resolve())], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            cwd=REPOSITORY, env={**defaults, **os.environ, "PYTHONPATH": path}, process_group=0,
        )  # fmt: skip
        reason = ""
        try:
            if check.wait(min(limit, left)):
                reason = f"exit status {check.returncode}; {log} has its output"
        except subprocess.TimeoutExpired:
            reason = f"killed after {min(limit, left):.0f} s; {log} has its stacks"
            check.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(check.pid, signal.SIGKILL)
            check.wait()
            output.write(f"===== {name} ended after {time.monotonic() - began:.0f} s =====\n".encode())
    if reason:
        append_line(results, name, failed("ended early", reason))


if __name__ == "__main__":
    exit_with(main)
