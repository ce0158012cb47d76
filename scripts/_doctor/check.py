"""A line of the report, and functions that run commands and read values without raising. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Verdicts. ok; note: runs work, but something optional does not; problem: runs fail."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    topic: str
    verdict: str
    finding: str
    fix: str = ""
    """Config key or command that fixes the problem; empty if there is nothing to fix."""

    def __str__(self) -> str:
        return f"{self.verdict:<7}  {self.topic:<9}  {self.finding}" + (f"  -> {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command; `status` is None if it is missing or timed out."""

    status: int | None
    output: str
    errors: str

    @property
    def error_line(self) -> str:
        """Last line of stderr, else of stdout, else the exit status."""
        return last_line(self.errors) or last_line(self.output) or f"ended with status {self.status}"


def run_command(*command: str, seconds: float = 15, env: dict[str, str] | None = None) -> CommandResult:
    """Run a command without input and return its output; kill its process group after `seconds`."""
    program = shutil.which(command[0])
    if program is None:
        return CommandResult(None, "", f"{command[0]} is not on PATH")
    try:
        child = subprocess.Popen(
            [program, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return CommandResult(None, "", f"{command[0]} cannot be run: {error.strerror}")
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        timed_out = f"{Path(program).name} timed out after {seconds:g} s"
        return CommandResult(None, output, ": ".join(filter(None, [timed_out, last_line(errors)])))
    return CommandResult(child.returncode, output, errors)


def last_line(text: str) -> str:
    """Return the last non-empty line, shortened."""
    return shorten(text.strip().rpartition("\n")[2])


def shorten(text: str, length: int = 160) -> str:
    """Return `text` on one line of at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def read_text(path: Path) -> str:
    """Return the content of a file, or '' if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def variable(name: str) -> str:
    """Return the value of an environment variable, or '' if it is not set."""
    return os.environ.get(name, "").strip()
