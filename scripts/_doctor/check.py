"""A line of the report, and functions that run commands and inspect files without raising. Standard library only."""

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


def run_command(
    *command: str, seconds: float = 15, cwd: Path | None = None, env: dict[str, str] | None = None
) -> CommandResult:
    """Run a command without input and return its output; kill its process group after `seconds`."""
    found = shutil.which(command[0])
    if found is None:
        return CommandResult(None, "", f"{command[0]} is not on PATH")
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            [found, *command[1:]], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=cwd, env=env,
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
        last = last_line(errors)
        return CommandResult(
            None, output, f"{Path(found).name} timed out after {seconds:g} s" + (f": {last}" if last else "")
        )
    return CommandResult(child.returncode, output, errors)


def last_line(text: str) -> str:
    """Return the last non-empty line, shortened."""
    lines = [line for line in text.splitlines() if line.strip()]
    return shorten(lines[-1]) if lines else ""


def shorten(text: str, length: int = 160) -> str:
    """Return `text` on one line of at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def gib(size: float) -> str:
    """Format a number of bytes in GiB or TiB."""
    return f"{size / 2**30:.3g} GiB" if size < 2**40 else f"{size / 2**40:.3g} TiB"


def existing(path: Path) -> Path:
    """Return `path`, or its nearest existing parent."""
    for each in (path, *path.parents):
        try:
            if each.exists():
                return each
        except OSError:
            continue
    return Path("/")


def why_not_writable(folder: Path) -> str:
    """Return why no file can be created in `folder` or its nearest existing parent; '' if one can."""
    parent = existing(folder)
    if not parent.is_dir():
        return f"{parent} is a file"
    probe = parent / f".doctor-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        return f"{parent}: {error.strerror}"
    return ""


def read_text(path: Path) -> str:
    """Return the content of a file, or '' if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def variable(name: str) -> str:
    """Return the value of an environment variable, or '' if it is not set."""
    return os.environ.get(name, "").strip()
