"""A run with a random fault every half minute, restarted after each, ends with the weights of an undisturbed run.

    MESHBOOK_TORTURE=1 MESHBOOK_CHAOS_MINUTES=30 pytest tests/recipes/test_chaos.py -s

The faults: a rank, every rank or the launcher is killed; a rank hangs; the run is preempted or interrupted; a bit of
the newest checkpoint is flipped, or a file of it truncated, and all processes are killed. The weights are compared
bitwise.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.launching import Bench
from tests.suites import TORTURE

PROJECT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("MESHBOOK_CHAOS_MINUTES", "30"))
PAUSE = 30.0
"""Seconds from one fault to the next."""
STEP = 0.5
"""Approximate seconds per step, from which STEPS is chosen so that a run with faults takes about MINUTES."""
EVERY = 2
"""Steps between two checkpoints."""
STEPS = round(MINUTES * 60 / STEP * 0.6)
JOB = (
    *("model=tiny", "cluster=local_2proc", "cluster.device=cpu", "parallelism=fsdp2", f"training.max_steps={STEPS}"),
    *("training.seq_len=256", "training.global_batch_size=64", "training.micro_batch_size=16", "training.eval_every=0"),
    *("data.max_eval_samples=8", "generation.samples=0", "generation.prompts=[]", "logging.examples=0"),
    *(f"checkpoint.every={EVERY}", "checkpoint.keep=3", "training.step_timeout_seconds=10", "logging.plot=false"),
)


class Chaos:
    """Injects random faults into a run and restarts it after each."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.bench, self.rng = Bench(folder), rng
        self.run_dir = folder / "run"
        self.faults: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the run; its output is appended to terminal.txt."""
        with (self.bench.folder / "terminal.txt").open("a") as terminal:
            self.process = subprocess.Popen(
                [sys.executable, PROJECT / "recipes" / "finetune.py", *JOB, f"run.dir={self.run_dir}"],
                cwd=self.bench.folder,
                env={name: value for name, value in os.environ.items() if not name.startswith("MESHBOOK_")}
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)},
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        found = []
        for process in self.bench.processes():
            try:
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(each.startswith(b"RANK=") for each in variables):
                found.append(process)
        return found

    def send(self, processes: list[int], number: int) -> None:
        """Send a signal to those of these processes that still exist."""
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def kill_a_rank(self) -> None:
        """Kill the first or the last rank."""
        self.send(self.ranks()[:1] if self.rng.random() < 0.5 else self.ranks()[-1:], signal.SIGKILL)

    def kill_every_rank(self) -> None:
        """Kill all ranks."""
        self.send(self.ranks(), signal.SIGKILL)

    def kill_the_launcher(self) -> None:
        """Kill the launcher; the ranks must exit by themselves."""
        self.process.kill()

    def kill_everything(self) -> None:
        """Kill all processes, as a power failure would."""
        self.process.kill()
        self.send(self.bench.processes(), signal.SIGKILL)

    def stop_a_rank(self) -> None:
        """Stop a rank, so that it hangs forever."""
        self.send(self.ranks()[:1], signal.SIGSTOP)

    def preempt(self) -> None:
        """Preempt the run."""
        self.process.send_signal(self.rng.choice([signal.SIGTERM, signal.SIGUSR2]))

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def flip_a_bit(self) -> None:
        """Flip one bit of the newest checkpoint."""
        self.damage(lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])

    def truncate(self) -> None:
        """Truncate a file of the newest checkpoint."""
        self.damage(lambda data: data[: len(data) // 2])

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        """Kill all processes and change a file of the newest checkpoint in place."""
        self.kill_everything()
        self.process.wait()
        newest = max((self.run_dir / "checkpoints").glob("step_*[0-9]"), key=lambda path: path.stat().st_mtime)
        file = self.rng.choice(sorted(newest.glob("*.safetensors")))
        file.write_bytes(change(file.read_bytes()))

    def fault(self) -> None:
        """Inject a random fault."""
        kinds = [
            *(self.kill_a_rank, self.kill_every_rank, self.kill_the_launcher, self.kill_everything, self.stop_a_rank),
            *(self.preempt, self.interrupt, self.flip_a_bit, self.truncate),
        ]
        kind = self.rng.choice(kinds)
        self.faults.append(kind.__name__)
        kind()

    def run(self, faults_for: float) -> float:
        """Run to the end, with a fault after every pause in the first `faults_for` seconds; return the duration."""
        began = time.monotonic()
        while True:
            self.start()
            over = time.monotonic() - began >= faults_for
            try:
                status = self.process.wait(timeout=None if over else PAUSE * self.rng.uniform(0.7, 1.3))
            except subprocess.TimeoutExpired:
                self.fault()
                self.process.wait(timeout=60)  # after every fault the run must end by itself
                self.bench.assert_no_process_left()
                continue
            assert status == 0, self.terminal()
            return time.monotonic() - began

    def terminal(self) -> str:
        """Return the end of the output."""
        return (self.bench.folder / "terminal.txt").read_text()[-3000:]


def steps_done(terminal: Path) -> int:
    """Count the steps that rank 0 logged, including repeated ones."""
    return len(re.findall(r"^step +\d+ +loss", terminal.read_text(errors="replace"), re.MULTILINE))


@pytest.mark.skipif(not TORTURE, reason="takes half an hour, and the undisturbed run about as long: make torture")
@pytest.mark.timeout(0)
def test_run_with_random_faults_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    undisturbed, chaos = (Chaos(tmp_path / name, random.Random(6)) for name in ("undisturbed", "chaos"))
    for each in (undisturbed, chaos):
        each.bench.folder.mkdir()
    undisturbed_seconds = undisturbed.run(faults_for=0)
    chaos_seconds = chaos.run(faults_for=60 * MINUTES)
    result = json.loads((chaos.run_dir / "result.json").read_text())
    done = steps_done(chaos.bench.folder / "terminal.txt")
    kinds = ", ".join(f"{chaos.faults.count(kind)} {kind}" for kind in sorted({*chaos.faults}))
    print(f"\n{len(chaos.faults)} faults in {chaos_seconds:.0f} s, undisturbed {undisturbed_seconds:.0f} s: {kinds}")
    print(f"{STEPS} of {done} steps useful ({STEPS / done:.1%})")
    assert result["status"] == "ok"
    assert result["steps"] == STEPS
    assert STEPS / done >= 0.9
    weights = [each.run_dir / "export" / "model.safetensors" for each in (undisturbed, chaos)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
