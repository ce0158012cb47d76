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
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Callable, Iterator  # noqa: UP035  (so that an old Python can import this file and report itself)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from components.terminal import HelpText, fit, guard_output, print_text, terminal_width
from scripts._doctor.check import NOTE, PROBLEM, ROOT, Check, last_line, run_command, shorten
from scripts._doctor.environment import INSTALL, check_packages, check_project, check_python, check_weights
from scripts._doctor.kubernetes import check_k8s
from scripts._doctor.machine import check_disk, check_driver, check_machine, check_network
from scripts._doctor.services import check_hub, check_slurm, check_wandb

SECONDS, TORCH_SECONDS = 60.0, 180.0
"""Time limits of a check, and of the one that imports torch, which is slow from a network disk."""


def check_torch() -> list[Check]:
    """Run the checks that need torch in a subprocess, which may crash or hang."""
    if importlib.util.find_spec("torch") is None:
        return [Check("torch", PROBLEM, "is not installed", INSTALL)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    script = str(ROOT / "scripts" / "_doctor" / "devices.py")
    answer = run_command(sys.executable, script, seconds=TORCH_SECONDS, env=env)
    checks = [Check(**json.loads(line)) for line in answer.output.splitlines() if line.startswith('{"topic"')]
    if answer.status != 0:
        ended = [] if answer.status is None else [f"ended with status {answer.status}"]
        text = ": ".join([*ended, *filter(None, [last_line(answer.errors)])])
        checks.append(Check("torch", PROBLEM, text, f"{INSTALL}; python -c 'import torch'"))
    return checks


CHECKS: tuple[Callable[[], list[Check]], ...] = (
    check_project, check_python, check_packages, check_weights, check_machine, check_disk, check_hub, check_wandb,
    check_slurm, check_k8s, check_network, check_driver, check_torch,
)  # fmt: skip


def examine() -> Iterator[list[Check]]:
    """Run all checks concurrently, and yield the results of each in the order of CHECKS."""
    began = time.monotonic()
    for check, future in [(check, _start(check)) for check in CHECKS]:
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


def _start(check: Callable[[], list[Check]]) -> Future[list[Check]]:
    """Run a check in a thread that does not keep the process from exiting, as that of an executor would."""
    future: Future[list[Check]] = Future()

    def run() -> None:
        try:
            future.set_result(check())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def main(arguments: list[str]) -> int:
    """Print the report and return the exit status."""
    guard_output(sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    checks: list[Check] = []
    for found in examine():
        checks += found
        if not options.json:
            for check in found:
                line = str(check)
                if len(line) > terminal_width():  # the fix goes below
                    line = line.replace("  -> ", f"\n{' ' * 20}-> ", 1)
                print_text(fit(line), flush=True)
    problems, notes = (sum(check.verdict == verdict for check in checks) for verdict in (PROBLEM, NOTE))
    if options.json:
        print_text(json.dumps({"runnable": not problems, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        to_fix = f"{problems} problem{'s' * (problems > 1)} to fix before a run can start"
        print_text(to_fix if problems else f"A run can start ({notes} note{'s' * (notes != 1)}).")
    return int(problems > 0)


if __name__ == "__main__":
    if sys.stdout is None:  # started with stdout closed (>&-)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as error:  # doctor.py | head, or a full disk
        status = 1
        os.write(2, f"the report cannot be written: {error.strerror}\n".encode())
    os._exit(status)  # a normal exit would write once more to an output that cannot be written
