"""Check that the machine, the Python environment, the cluster and the caches are ready for a run.

python scripts/doctor.py           # exit status 0: a run can start; 1: a problem would prevent it
python scripts/doctor.py --json    # one JSON object

Each check prints a line, with a fix if there is a problem. Verdicts: ok; note: runs work, but something optional does
not; problem: runs fail. No check changes anything or prints an access token.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from components.terminal import HelpText, exit_with, fit, print_text, terminal_width
from scripts._doctor import clusters, environment, machine
from scripts._doctor.check import NOTE, PROBLEM, ROOT, Check, last_line, run_command, shorten

SECONDS, TORCH_SECONDS = 60.0, 180.0
"""Time limits of a check, and of the one that imports torch, which is slow from a network disk."""


def check_torch() -> list[Check]:
    """Run the checks that need torch in a subprocess, which may crash or hang."""
    if importlib.util.find_spec("torch") is None:
        return [Check("torch", PROBLEM, "is not installed", environment.INSTALL)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    script = str(ROOT / "scripts" / "_doctor" / "devices.py")
    answer = run_command(sys.executable, script, seconds=TORCH_SECONDS, env=env)
    checks = [Check(**json.loads(line)) for line in answer.output.splitlines() if line.startswith('{"topic"')]
    if answer.status != 0:
        ended = f"ended with status {answer.status}" if answer.status is not None else ""
        finding = ": ".join(filter(None, [ended, last_line(answer.errors)]))
        checks.append(Check("torch", PROBLEM, finding, f"{environment.INSTALL}; python -c 'import torch'"))
    return checks


CHECKS: tuple[Callable[[], list[Check]], ...] = (
    environment.check_project, environment.check_python, environment.check_packages, environment.check_weights,
    machine.check_machine, machine.check_disk, environment.check_hub, environment.check_wandb,
    clusters.check_slurm, clusters.check_k8s, machine.check_network, machine.check_driver, check_torch,
)  # fmt: skip


def examine() -> Iterator[list[Check]]:
    """Run all checks concurrently, and yield the results of each in the order of CHECKS."""
    began = time.monotonic()
    futures: dict[Callable[[], list[Check]], Future[list[Check]]] = {check: Future() for check in CHECKS}
    for check, future in futures.items():
        # Not an executor, whose threads would keep the process from exiting while a check hangs.
        Thread(target=_run, args=(check, future), daemon=True).start()
    for check, future in futures.items():
        topic = check.__name__[len("check_") :]
        limit = TORCH_SECONDS + 10 if check is check_torch else SECONDS
        try:
            yield future.result(timeout=max(began + limit - time.monotonic(), 0.01))
        except Exception as error:  # an unforeseen failure of one check must not hide the results of the others
            if future.done():
                text = f"could not be checked: {type(error).__name__}: {shorten(str(error))}"
                yield [Check(topic, NOTE, text)]
            else:
                text = f"timed out after {limit:g} s; a run would hang too (is a network disk unreachable?)"
                yield [Check(topic, PROBLEM, text)]


def _run(check: Callable[[], list[Check]], future: Future[list[Check]]) -> None:
    try:
        future.set_result(check())
    except BaseException as error:
        future.set_exception(error)


def main(arguments: list[str]) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    checks: list[Check] = []
    for results in examine():
        checks += results
        for line in map(str, () if options.json else results):
            if len(line) > terminal_width():  # the fix goes below
                line = line.replace("  -> ", f"\n{' ' * 20}-> ", 1)
            print_text(fit(line), flush=True)
    problems, notes = (sum(check.verdict == verdict for check in checks) for verdict in (PROBLEM, NOTE))
    if options.json:
        print_text(json.dumps({"runnable": not problems, "checks": [asdict(check) for check in checks]}, indent=2))
    elif problems:
        print_text(f"{problems} problem{'s' * (problems > 1)} to fix before a run can start")
    else:
        print_text(f"A run can start ({notes} note{'s' * (notes != 1)}).")
    return int(problems > 0)


if __name__ == "__main__":
    exit_with(main)
