"""Helpers that start small recipes through the launcher, in real processes, as a user would."""

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
from typing import Any

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SAVE = "                run.save(step)\n"
EXIT_AFTER_SAVE = (SAVE, f"{SAVE}                raise SystemExit(9)\n")
"""Change of a recipe: it exits 9 after its first save."""
HEADER = """
import json, os, signal, sys, time
from pathlib import Path
from components.protocol.errors import ConfigError
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
WAIT_TIMEOUT = 240.0
"""Timeout of every wait, in seconds; many times what a busy machine needs."""


@dataclass(frozen=True)
class Done:
    """Exit status, output and duration of a recipe process."""

    status: int
    output: str
    errors: str
    seconds: float


class Started:
    """A running recipe process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._began = time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher process only."""
        self.process.send_signal(number)

    def wait(self) -> Done:
        """Wait for the process to exit."""
        output, errors = self.process.communicate(timeout=WAIT_TIMEOUT)
        return Done(self.process.returncode, output, errors, time.monotonic() - self._began)


@dataclass(frozen=True)
class Bench:
    """Working directory of a launcher test: a recipe file and the runs started from it."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """Path of the recipe file."""
        return self.folder / "tried.py"

    def write(self, body: str) -> None:
        """Write a recipe whose main has this body. It can use `note(name, value)`, `wait_for(name_rank)` and RANK."""
        self.recipe.write_text(HEADER + textwrap.indent(textwrap.dedent(body), "    ") + FOOTER)

    def start(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        command: tuple[str, ...] = (sys.executable,),
        model: str = "tiny",
    ) -> Started:
        """Start `COMMAND tried.py model=MODEL ARGUMENTS` without inherited MESHBOOK_ and SLURM_ variables."""
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
        """Start the recipe and wait for its end."""
        return self.start(*arguments, **options).wait()

    def complete(self, *arguments: str, **options: Any) -> Done:
        """Start the recipe, wait for its end, and check that it exits 0."""
        done = self.start(*arguments, **options).wait()
        assert done.status == 0, done.output + done.errors
        return done

    def copy(self, recipe: str, *changes: tuple[str, str]) -> None:
        """Copy a file of recipes/ with texts, each of which it has once, replaced."""
        text = (RECIPES / recipe).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        self.recipe.write_text(text)

    def lines(self, run: str = "mine", key: str = "") -> list[dict[str, Any]]:
        """Return the lines of a run's metrics.jsonl, all or those that have this key."""
        text = (self.folder / run / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if not key or key in line]

    def notes(self, name: str) -> list[str]:
        """Return the values that the ranks wrote with `note(name, value)`, in rank order."""
        return [file.read_text() for file in sorted(self.folder.glob(f"{name}_[0-9]"))]

    def await_notes(self, name: str, count: int) -> None:
        """Wait until `count` ranks have called `note(name)`."""
        until(lambda: len(self.notes(name)) == count)

    def run_directories(self) -> list[Path]:
        """Return the run directories under outputs/."""
        return sorted((self.folder / "outputs" / "finetune").glob("*"))

    def result(self) -> dict[str, str]:
        """Return result.json of the only run."""
        (run,) = self.run_directories()
        return json.loads((run / "result.json").read_text())

    def processes(self) -> list[int]:
        """Return the ids of all processes that work in this folder or have it in their environment or command line."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                text += os.readlink(entry / "cwd").encode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # the process has ended meanwhile, or is not readable
            if state != "Z" and str(self.folder).encode() in text:
                found.append(int(entry.name))
        return found

    def assert_no_process_left(self) -> None:
        """Wait until no process of this folder is left; a killed process takes a moment to disappear."""
        until(lambda: not self.processes())


def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def kill_leftovers(bench: Bench) -> None:
    """Kill the processes that a test has left, whether it passed or failed."""
    for process in bench.processes():
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
