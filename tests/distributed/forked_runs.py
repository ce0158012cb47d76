"""Complete runs of recipes/finetune.py, launcher and ranks, that start quickly, so that a test can kill hundreds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.preloaded import ROOT, PreloadedPopen

RECIPE = ROOT / "recipes" / "finetune.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.05")


@dataclass
class Attempt:
    """One start of the command."""

    process: PreloadedPopen
    log: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Process id of the launcher, or of TorchElastic's agent."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.process.poll()

    def ranks(self) -> dict[str, int]:
        """Return the process ids of the running ranks by name (rank0, rank1)."""
        found = {}
        for child in _children(self.pid):
            name = _comm(child)
            if name.startswith("rank"):
                found[name] = child
        return found

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.process.poll()

    def wait(self, seconds: float) -> int:
        """Wait for the end, at most `seconds`, and return the exit status."""
        until(lambda: self.poll() is not None, seconds, self.output)
        return self.process.returncode

    def kill(self, target: str) -> list[int]:
        """Send SIGKILL to the launcher (or agent), all ranks or one rank; to the launcher if the rank has not started.

        Returns the process ids of the ranks that were running.
        """
        ranks = self.ranks()
        victims = list(ranks.values()) if target == "all" else [ranks[target]] if target in ranks else []
        for victim in victims or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        return list(ranks.values())

    def output(self) -> str:
        """Return the output of the launcher and rank 0."""
        return self.log.read_text(errors="replace")


@dataclass
class Command:
    """`python recipes/finetune.py ARGUMENTS run.dir=RUN_DIR`, or the same under torchrun."""

    folder: Path
    """Folder for the output, one file per start."""
    run_dir: Path
    arguments: list[str]
    elastic: bool = False

    def start(self, environment: dict[str, str] | None = None) -> Attempt:
        """Start the command in a new process group."""
        number = len(list(self.folder.glob(f"{self.run_dir.name}.*.log")))
        log = self.folder / f"{self.run_dir.name}.{number}.log"
        excluded = ("MESHBOOK_", "SLURM_", "TORCHELASTIC_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(excluded)}
        clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
        arguments = [*(TORCHRUN if self.elastic else ()), str(RECIPE), *self.arguments, f"run.dir={self.run_dir}"]
        with log.open("wb") as output:
            process = PreloadedPopen(
                [sys.executable, *arguments],
                env=clean, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
            )  # fmt: skip
        return Attempt(process, log)


def until(condition: Callable[[], bool], seconds: float, output: Callable[[], str] = str) -> None:
    """Wait for a condition; after `seconds` fail with `output()` in the message."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not met after {seconds} s\n{output()}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def steps_logged(run_dir: Path) -> int:
    """Return the last optimizer step in metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    written: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return max((line["step"] for line in written if "loss" in line), default=0)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    return [each for child in _children(pid) for each in (child, *descendants(child))]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
