"""A line of the report, and safe ways to run commands, read files and inspect folders. Standard library only."""

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
"""ok; note: a run works, but not everything does; problem: a run cannot start."""


@dataclass(frozen=True)
class Check:
    """One line of the report; `mend` is the key or command that fixes it."""

    topic: str
    verdict: str
    told: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<7}  {self.topic:<9}  {self.told}" + (f"  -> {self.mend}" if self.mend else "")


@dataclass(frozen=True)
class Answer:
    """Output of a command; `status` is None if it is missing or did not end in time."""

    status: int | None
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        """Last line of its errors, else of its output."""
        return last_line(self.errors) or last_line(self.output) or f"ended with status {self.status}"


def ask(*command: str, seconds: float = 15, cwd: Path | None = None, env: dict[str, str] | None = None) -> Answer:
    """Run a command without input and return its output; kill it and its children after `seconds`."""
    found = shutil.which(command[0])
    if found is None:
        return Answer(None, "", f"{command[0]} is not on PATH")
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            [found, *command[1:]], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=cwd, env=env,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer(None, "", f"{command[0]} cannot be run: {error.strerror}")
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        last = last_line(errors)
        return Answer(
            None, output, f"{Path(found).name} did not answer in {seconds:g} s" + (f": {last}" if last else "")
        )
    return Answer(child.returncode, output, errors)


def last_line(text: str) -> str:
    """Return the last line that is not empty, shortened."""
    lines = [line for line in text.splitlines() if line.strip()]
    return shorten(lines[-1]) if lines else ""


def shorten(text: str, length: int = 160) -> str:
    """Return `text` on one line of at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def gib(size: float) -> str:
    """Return a number of bytes in GiB or TiB."""
    return f"{size / 2**30:.3g} GiB" if size < 2**40 else f"{size / 2**40:.3g} TiB"


def existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    for each in (path, *path.parents):
        try:
            if each.exists():
                return each
        except OSError:
            continue
    return Path("/")


def why_not_writable(folder: Path) -> str:
    """Return why no file can be created in `folder` or its nearest existing parent; '' if one can."""
    place = existing(folder)
    if not place.is_dir():
        return f"{place} is a file"
    probe = place / f".doctor-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def read_text(path: Path) -> str:
    """Return the content of a file, '' if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def variable(name: str) -> str:
    """Return an environment variable, '' if it is not set."""
    return os.environ.get(name, "").strip()
