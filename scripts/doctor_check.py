"""What every check of scripts/doctor.py is made of. Standard library only, for Python 3.7 too: it must always start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OK, NOTE, PROBLEM = "ok", "note", "problem"
"""ok; note: a run works, but not everything does; problem: it would stop a run."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    topic: str
    verdict: str
    told: str
    mend: str = ""
    """The key or command that mends it."""

    def __str__(self) -> str:
        mend = f"  -> {self.mend}" if self.mend else ""
        return f"{self.verdict:<7}  {self.topic:<9}  {self.told}{mend}"

    def as_dict(self) -> dict[str, str]:
        """The fields, for --json."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """What a command said; `status` None: it is not there, or was ended after its time."""

    status: int | None
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        """Its last line of complaint, else of output."""
        return last_line(self.errors) or last_line(self.output) or f"ended with status {self.status}"


def ask(*command: str, seconds: float = 15, cwd: Path | None = None) -> Answer:
    """Run a command and return its answer, whatever happens."""
    found = shutil.which(command[0])
    if found is None:
        return Answer(None, "", f"{command[0]} is not on PATH")
    try:
        done = subprocess.run(
            [found, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, cwd=cwd, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = last_line((error.stderr or b"").decode(errors="replace"))
        return Answer(None, "", f"{command[0]} did not answer in {seconds:g} s" + (f": {said}" if said else ""))
    except OSError as error:
        return Answer(None, "", f"{command[0]} cannot be run: {error.strerror}")
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def last_line(text: str) -> str:
    """Return the last line that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return shorten(lines[-1]) if lines else ""


def shorten(text: str, length: int = 160) -> str:
    """Return `text` on one line of at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def gib(size: float) -> str:
    """Return a number of bytes as a text."""
    return f"{size / 2**30:.3g} GiB" if size < 2**40 else f"{size / 2**40:.3g} TiB"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: 2.13.0+cpu -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    for place in (path, *path.parents):
        try:
            if place.exists():
                return place
        except OSError:
            continue
    return Path("/")


def why_not_writable(folder: Path) -> str:
    """Return why nothing can be written to `folder` (made first where it is missing), '' where it can."""
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
    """Return what a file holds, '' where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def variable(name: str) -> str:
    """Return a variable of the environment, '' where it is not set."""
    return os.environ.get(name, "").strip()
