"""metrics.jsonl: one strict JSON object per line, with a checksum, so that damage to the history is noticed.

The last field of a line, `check`, is its number and the CRC-32 of that number and the text before the field. It finds
lines that were changed, and lines that are missing between two others. Values that are NaN or infinite are null; the
field `nonfinite` maps their keys to what they were.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.protocol.run_files import NONFINITE, atomic_file, finite, keep_only_file, open_append, read_regular

METRICS, DAMAGED = "metrics.jsonl", "metrics.jsonl.damaged"
CHECK = "check"
_CHECK = re.compile(rf', "{CHECK}": "(\d{{1,18}})-([0-9a-f]{{8}})"\}}$')
_JOINT = re.compile(rb'(?<=\})[^{}"]{0,3}(?=\{)')
"""Between two lines whose newline was lost, or changed to something else."""


@dataclass(slots=True)
class _Line:
    text: str
    """Without the checksum, and without the closing brace."""
    values: dict[str, Any]


@dataclass(slots=True)
class _Parsed:
    lines: list[_Line] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is missing or damaged, as sentences."""
    number: int = 0
    """Number of the last line."""


class MetricsLog:
    """The history of a run. Damaged lines are skipped and reported; `continue_from` moves them to their own file."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS
        self._number: int | None = None  # of the last line; None: the file has not been looked at

    def append(self, values: dict[str, Any]) -> None:
        """Add a line. Raises OSError that names the file and the bytes that are free."""
        with _named(self.path), open_append(self.path) as file:
            start = b""
            if self._number is None:
                self._number = _parse(self._content()).number
                start = b"" if self._ends_with_newline() else b"\n"
            self._number += 1
            file.write(start + _encode(json.dumps(finite(values), allow_nan=False)[:-1], self._number))

    def read(self) -> list[dict[str, Any]]:
        """Return the values of every intact line, NaN and infinities among them."""
        return [_restored(line.values) for line in _parse(self._content()).lines]

    def continue_from(self, step: int) -> list[str]:
        """Drop what is logged of later steps and return what there is to report, as sentences.

        The steps are done again, and the file stays one curve; so is the evaluation of `step` itself, with which an
        attempt begins. Damaged lines go to metrics.jsonl.damaged.
        """
        keep_only_file(self.path)
        parsed = _parse(self._content())
        if not (parsed.lines or parsed.damaged) and self._has_saved(step):
            return [f"{METRICS} is missing or empty: the history of steps 1 to {step} is lost"]
        kept = [line for line in parsed.lines if line.values["step"] < step + ("eval_loss" not in line.values)]
        told = list(parsed.problems)
        again = [line.values["step"] for line in parsed.lines if "loss" in line.values and line.values["step"] > step]
        if again:
            told.append(f"steps {min(again)} to {max(again)} in {METRICS} are dropped: they are done again")
        told += _missing_end([line.values["step"] for line in kept if "loss" in line.values], step)
        if parsed.damaged:
            with _named(self.path), open_append(self.path.with_name(DAMAGED)) as file:
                file.write(b"".join(line + b"\n" for line in parsed.damaged))
        if not self.path.exists():
            return told
        with _named(self.path), atomic_file(self.path) as new:
            new.write(b"".join(_encode(line.text, number) for number, line in enumerate(kept, 1)))
        self._number = len(kept)
        return told

    def _content(self) -> bytes:
        try:
            return b"" if self.path.is_symlink() else read_regular(self.path)
        except (FileNotFoundError, IsADirectoryError):
            return b""

    def _ends_with_newline(self) -> bool:
        return self._content()[-1:] in (b"", b"\n")

    def _has_saved(self, step: int) -> bool:
        """Whether this run, not another one that it began from, has saved this step."""
        return step > 0 and any(self.path.parent.glob(f"checkpoints/step_{step}*"))


def _encode(text: str, number: int) -> bytes:
    return f'{text}, "{CHECK}": "{number}-{_checksum(text, number)}"}}\n'.encode()


def _checksum(text: str, number: int) -> str:
    return f"{zlib.crc32(f'{number}:{text}'.encode()):08x}"


def _parse(content: bytes) -> _Parsed:
    parsed, unseen = _Parsed(), 0
    for raw in content.splitlines():
        pieces = [raw] if _values_of(raw) else _JOINT.split(raw)
        for piece in pieces:
            unseen = _take(parsed, piece, unseen)
    if parsed.damaged:
        count = len(parsed.damaged)
        lines = "a damaged line" if count == 1 else f"{count} damaged lines"
        parsed.problems.insert(0, f"{METRICS} holds {lines}: moved to {DAMAGED}")
    return parsed


def _take(parsed: _Parsed, raw: bytes, unseen: int) -> int:
    """Add a line to what was parsed; return how many damaged lines came since the last intact one."""
    values, text = _values_of(raw), raw.decode(errors="replace")
    if values is not None and CHECK not in values and not parsed.number:  # an earlier version wrote no checksums
        parsed.lines.append(_Line(json.dumps(finite(values), allow_nan=False)[:-1], values))
        return 0
    found = _CHECK.search(text)
    number, text = (int(found[1]), text[: found.start()]) if found else (0, text)
    if values is None or found is None or found[2] != _checksum(text, number) or number <= parsed.number:
        parsed.damaged.append(raw)
        return unseen + 1
    missing = number - parsed.number - 1 - unseen
    if missing > 0 and (parsed.number or not parsed.lines):
        count = "a line is" if missing == 1 else f"{missing} lines are"
        parsed.problems.append(f"{count} missing in {METRICS} before step {values['step']}")
    parsed.number = number
    parsed.lines.append(_Line(text, values))
    return 0


def _values_of(raw: bytes) -> dict[str, Any] | None:
    """Return the values of a line; None unless it is an object with the number of a step."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and type(values.get("step")) is int else None


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    odd = values.get(NONFINITE, {})
    kept = {key: value for key, value in values.items() if key not in (NONFINITE, CHECK)}
    return kept | {key: float(value) for key, value in odd.items()}


def _missing_end(steps: list[int], resumed: int) -> list[str]:
    """Report lines missing between the last one and the step that the run resumes from, by their usual distance."""
    distance = steps[-1] - steps[-2] if len(steps) > 1 else sum(steps)
    if steps and resumed >= steps[-1] + distance:
        return [f"{METRICS} ends with step {steps[-1]}: the history of the steps up to {resumed} is lost"]
    return []


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Have an error of the disk name the file and the bytes that are free: one in closing a file names nothing."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(file.parent).free
        raise OSError(error.errno, f"{error.strerror} ({free:,} bytes are free)", str(file)) from error
