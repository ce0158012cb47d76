"""Recipes for tests of the launcher: their own few lines of main, started as a person would start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HEADER = """
import json, os, signal, sys, time
from pathlib import Path
from components.config.errors import ConfigError
from components.config.schema import FinetuneConfig
from components.launch import recipe

RANK = int(os.environ.get("RANK", 0))

def note(name, value=""):
    (Path(__file__).parent / f"{name}_{RANK}").write_text(str(value))

def wait_for(*names):
    while not all((Path(__file__).parent / name).exists() for name in names):
        time.sleep(0.02)

@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
"""
FOOTER = '\nif __name__ == "__main__":\n    main()\n'

TWO = "cluster.procs_per_node=2"
PATIENCE = 240.0
"""Seconds after which a test gives up, many times what a busy machine needs."""


@dataclass(frozen=True)
class Done:
    """How a started recipe ended."""

    status: int
    output: str
    errors: str
    seconds: float


class Started:
    """A recipe that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._began = time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(number)

    def wait(self) -> Done:
        """Wait for the end."""
        output, errors = self.process.communicate(timeout=PATIENCE)
        return Done(self.process.returncode, output, errors, time.monotonic() - self._began)


@dataclass(frozen=True)
class Bench:
    """A folder with a recipe."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """The recipe's file."""
        return self.folder / "tried.py"

    def write(self, body: str) -> None:
        """Write a recipe whose main has this body. It finds `note(name, value)`, `wait_for(name_rank)` and RANK."""
        self.recipe.write_text(HEADER + textwrap.indent(textwrap.dedent(body), "    ") + FOOTER)

    def start(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        command: tuple[str, ...] = (sys.executable,),
        model: str = "tiny",
    ) -> Started:
        """Start `command tried.py model=MODEL ARGUMENTS`, without what this test's own environment says of ranks."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MESHBOOK_", "SLURM_"))}
        clean |= {"CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        return Started(
            subprocess.Popen(
                [*command, str(self.recipe), f"model={model}", *arguments],
                cwd=cwd or self.folder,
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def run(self, *arguments: str, **options: dict[str, str]) -> Done:
        """Start and wait."""
        return self.start(*arguments, **options).wait()

    def notes(self, name: str) -> list[str]:
        """What the ranks noted under `name`, in rank order."""
        return [file.read_text() for file in sorted(self.folder.glob(f"{name}_[0-9]"))]

    def await_notes(self, name: str, count: int) -> None:
        """Wait until `count` ranks have noted `name`."""
        until(lambda: len(self.notes(name)) == count)

    def run_directories(self) -> list[Path]:
        """The run directories under outputs/."""
        return sorted((self.folder / "outputs" / "finetune").glob("*"))

    def result(self) -> dict[str, str]:
        """The only run's result.json."""
        (run,) = self.run_directories()
        return json.loads((run / "result.json").read_text())

    def processes(self) -> list[int]:
        """Every process whose variables or command name this folder, by id."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it ended meanwhile, or is not ours to read
            if state != "Z" and str(self.folder).encode() in said:
                found.append(int(entry.name))
        return found

    def assert_nobody_left(self) -> None:
        """No process of this folder remains (a killed one needs a moment to go)."""
        until(lambda: not self.processes())


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def kill_leftovers(bench: Bench) -> None:
    """After a test, however it ended."""
    for process in bench.processes():
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
