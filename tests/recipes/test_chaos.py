"""A run to which something happens every half minute, and its command typed again: the end is a quiet run's to the bit.

    MESHBOOK_TORTURE=1 MESHBOOK_CHAOS_MINUTES=30 pytest tests/recipes/test_chaos.py -s

What happens is drawn: a rank, every rank or the launcher is killed; a rank is stopped and does not come back; the run
is told to save and leave, or interrupted; the newest checkpoint loses a bit or its end before everything is killed.
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

PROJECT = Path(__file__).resolve().parents[2]
TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"
MINUTES = float(os.environ.get("MESHBOOK_CHAOS_MINUTES", "30"))
PAUSE = 30.0
"""Seconds from one fault to the next."""
STEP = 0.5
"""Seconds of a step, about: so that a run with faults takes about MINUTES."""
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
    """Starts the run again and again, and does things to it."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.bench, self.draw = Bench(folder), draw
        self.run_dir = folder / "run"
        self.faults: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Type the command; what it says is kept in a file."""
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
        """The processes of the ranks."""
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
        """Send a signal to processes, those that are gone left out."""
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def kill_a_rank(self) -> None:
        """One rank dies."""
        self.send(self.ranks()[:1] if self.draw.random() < 0.5 else self.ranks()[-1:], signal.SIGKILL)

    def kill_every_rank(self) -> None:
        """All ranks die."""
        self.send(self.ranks(), signal.SIGKILL)

    def kill_the_launcher(self) -> None:
        """Who started the ranks dies."""
        self.process.kill()

    def kill_everything(self) -> None:
        """As a power failure."""
        self.process.kill()
        self.send(self.bench.processes(), signal.SIGKILL)

    def stop_a_rank(self) -> None:
        """A rank hangs for ever."""
        self.send(self.ranks()[:1], signal.SIGSTOP)

    def ask_to_leave(self) -> None:
        """A preemption."""
        self.process.send_signal(self.draw.choice([signal.SIGTERM, signal.SIGUSR2]))

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def flip_a_bit(self) -> None:
        """The newest checkpoint is damaged."""
        self.damage(lambda bytes_: bytes_[:-9] + bytes([bytes_[-9] ^ 4]) + bytes_[-8:])

    def cut_short(self) -> None:
        """The newest checkpoint loses its end."""
        self.damage(lambda bytes_: bytes_[: len(bytes_) // 2])

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        """Kill everything, and change a file of the newest checkpoint in place."""
        self.kill_everything()
        self.process.wait()
        newest = max((self.run_dir / "checkpoints").glob("step_*[0-9]"), key=lambda path: path.stat().st_mtime)
        file = self.draw.choice(sorted(newest.glob("*.safetensors")))
        file.write_bytes(change(file.read_bytes()))

    def fault(self) -> None:
        """Do one of these."""
        kinds = [
            *(self.kill_a_rank, self.kill_every_rank, self.kill_the_launcher, self.kill_everything, self.stop_a_rank),
            *(self.ask_to_leave, self.interrupt, self.flip_a_bit, self.cut_short),
        ]
        kind = self.draw.choice(kinds)
        self.faults.append(kind.__name__)
        kind()

    def run(self, faults_for: float) -> float:
        """Run to the end, for so many seconds with a fault after every pause; return how long it took, in seconds."""
        began = time.monotonic()
        while True:
            self.start()
            over = time.monotonic() - began >= faults_for
            try:
                status = self.process.wait(timeout=None if over else PAUSE * self.draw.uniform(0.7, 1.3))
            except subprocess.TimeoutExpired:
                self.fault()
                self.process.wait(timeout=60)  # whatever happened, it ends by itself
                self.bench.assert_nobody_left()
                continue
            assert status == 0, self.terminal()
            return time.monotonic() - began

    def terminal(self) -> str:
        """The end of what the terminal showed."""
        return (self.bench.folder / "terminal.txt").read_text()[-3000:]


def steps_done(terminal: Path) -> int:
    """Every step that rank 0 told of, those done again too."""
    return len(re.findall(r"^step +\d+ +loss", terminal.read_text(errors="replace"), re.MULTILINE))


@pytest.mark.skipif(not TORTURE, reason="half an hour and as long for the quiet run: make torture")
@pytest.mark.timeout(0)
def test_chaos_ends_where_a_quiet_run_ends(tmp_path: Path) -> None:
    quiet, chaos = (Chaos(tmp_path / name, random.Random(6)) for name in ("quiet", "chaos"))
    for each in (quiet, chaos):
        each.bench.folder.mkdir()
    quiet_seconds = quiet.run(faults_for=0)
    chaos_seconds = chaos.run(faults_for=60 * MINUTES)
    result = json.loads((chaos.run_dir / "result.json").read_text())
    done = steps_done(chaos.bench.folder / "terminal.txt")
    kinds = ", ".join(f"{chaos.faults.count(kind)} {kind}" for kind in sorted({*chaos.faults}))
    print(f"\n{len(chaos.faults)} faults in {chaos_seconds:.0f} s, the quiet run {quiet_seconds:.0f} s: {kinds}")
    print(f"{STEPS} of {done} steps useful ({STEPS / done:.1%})")
    assert result["status"] == "ok"
    assert result["steps"] == STEPS
    assert STEPS / done >= 0.9
    weights = [each.run_dir / "export" / "model.safetensors" for each in (quiet, chaos)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
