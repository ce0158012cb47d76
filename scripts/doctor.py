"""Whether this machine, environment, cluster and cache can run: one line per check, with what mends it.

python scripts/doctor.py           # status 0: a run can start; 1: a problem would stop one
python scripts/doctor.py --json    # the same for programs

ok: fine. note: a run works, but not everything does. problem: it stops a run. Nothing is changed, no token is shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Callable, Iterator  # noqa: UP035  (an old Python must be told that it is old)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from components.terminal import print_text  # only the standard library
from scripts.doctor_check import NOTE, PROBLEM, ROOT, Check, last_line, shorten
from scripts.doctor_machine import check_disk, check_driver, check_machine, check_network
from scripts.doctor_python import INSTALL, check_packages, check_project, check_python, check_weights
from scripts.doctor_services import check_hub, check_slurm, check_wandb

SECONDS, TORCH_SECONDS = 60.0, 180.0
"""How long a check may take; importing torch from a slow disk takes longest."""


def check_torch() -> list[Check]:
    """What torch says of devices and of two processes, asked in a process of its own."""
    if importlib.util.find_spec("torch") is None:
        return [Check("torch", PROBLEM, "is not installed", INSTALL)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MESHBOOK_", "TORCHELASTIC_"))}
    slurm = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *slurm):
        environ.pop(name, None)
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "doctor_torch.py")],
        env={"OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=TORCH_SECONDS)
        ended = f"ended with status {child.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        output, errors = child.communicate()
        ended = f"did not answer in {TORCH_SECONDS:g} s"
    lines = output.decode(errors="replace").splitlines()
    checks = [Check(**json.loads(line)) for line in lines if line.startswith('{"topic"')]
    if child.returncode != 0:
        told = last_line(errors.decode(errors="replace"))
        checks.append(
            Check("torch", PROBLEM, f"{ended}: {told}" if told else ended, f"{INSTALL}; python -c 'import torch'")
        )
    return checks


CHECKS: tuple[Callable[[], list[Check]], ...] = (
    check_project, check_python, check_packages, check_weights, check_machine, check_disk, check_hub, check_wandb,
    check_slurm, check_network, check_driver, check_torch,
)  # fmt: skip


def examine() -> Iterator[list[Check]]:
    """Yield what each check finds, in order. They run at the same time, and none can hold up the others for long."""
    began, answers = time.monotonic(), []
    for check in CHECKS:
        answer: Queue[list[Check]] = Queue()
        threading.Thread(target=_answer, args=(check, answer), daemon=True).start()
        answers.append((check, answer))
    for check, answer in answers:
        limit = TORCH_SECONDS + 10 if check is check_torch else SECONDS
        try:
            yield answer.get(timeout=max(began + limit - time.monotonic(), 0.01))
        except Empty:
            told = f"no answer in {limit:g} s; a run would wait too (a network disk that is gone?)"
            yield [Check(_topic(check), PROBLEM, told)]


def _answer(check: Callable[[], list[Check]], answer: Queue[list[Check]]) -> None:
    try:
        answer.put(check())
    except Exception as error:  # of whatever machine nobody has thought of: the other lines are still worth having
        told = f"could not be checked: {type(error).__name__}: {shorten(str(error))}"
        answer.put([Check(_topic(check), NOTE, told)])


def _topic(check: Callable[[], list[Check]]) -> str:
    return check.__name__[len("check_") :]


def main() -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    checks: list[Check] = []
    for found in examine():
        checks += found
        if not options.json:
            for check in found:
                print_text(check, flush=True)
    problems, notes = (sum(check.verdict == verdict for check in checks) for verdict in (PROBLEM, NOTE))
    if options.json:
        print(json.dumps({"runnable": not problems, "checks": [check.as_dict() for check in checks]}, indent=2))
    else:
        mended = f"{problems} problem{'s' * (problems > 1)} to mend before a run can start"
        print_text(mended if problems else f"A run can start ({notes} note{'s' * (notes != 1)}).")
    return int(problems > 0)


if __name__ == "__main__":
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:  # doctor.py | head, or a full disk
        status = 1
        os.write(2, f"the report cannot be written: {error.strerror}\n".encode())
    os._exit(status)  # not through the interpreter's end, which would wait for a check that hangs
