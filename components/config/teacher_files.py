"""Headers of the files with a teacher's most likely tokens, which scripts/teacher.py writes for recipes/distill.py.

Each is a safetensors file with one entry per target token of a split, in the order of its rows.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from components.config.errors import ConfigError

SPLITS = ("train", "eval")
METADATA = "teacher"
"""Key of the JSON text of a `TeacherHeader` in a file's metadata."""
_LARGEST_HEADER = 1 << 20  # bytes; a larger number is not the size of a header


def teacher_file(folder: str, split: str) -> Path:
    """Return the path of the file of a split."""
    return Path(os.path.expanduser(folder)) / f"top_k_{split}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHeader:
    """What the probabilities in a file belong to."""

    samples: str
    """Fingerprint of the dataset."""
    tokenizer: str
    """Hash of the tokens and their ids."""
    vocabulary: int
    """Entries of the student's vocabulary, over which the probabilities sum to 1."""
    top_k: int
    """Most likely tokens per target."""
    temperature: float
    """Temperature of the probabilities."""
    teacher: str
    """The teacher's path, for messages."""


class TeacherFile(NamedTuple):
    """Header of a file, and where its tensors are."""

    header: TeacherHeader
    offsets: dict[str, tuple[int, int]]
    """Bytes of each tensor in the file, [begin, end)."""


def read_teacher_file(file: Path) -> TeacherFile:
    """Read the header of a file. Raises OSError if it cannot be read, and ValueError if it is damaged."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError("it is not a safetensors file")
        header = json.loads(content.read(size))
        length = os.fstat(content.fileno()).st_size
    try:
        described = TeacherHeader(**json.loads(header.pop("__metadata__")[METADATA]))
        begins = {name: entry["data_offsets"] for name, entry in header.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("it was not written by scripts/teacher.py") from error
    offsets = {name: (8 + size + begin, 8 + size + end) for name, (begin, end) in begins.items()}
    if max(end for _, end in offsets.values()) != length:
        raise ValueError(f"it has {length:,} bytes, not those that its header lists")
    return TeacherFile(described, offsets)


def header_text(header: TeacherHeader) -> str:
    """Return the value of `METADATA`."""
    return json.dumps(asdict(header))


def check_stored_teacher(folder: str, temperature: float, vocabulary: int | None) -> list[str]:
    """Return the problems of `teacher.stored` that can be found without reading the data or a tokenizer.

    Args:
        temperature: `objective.temperature`.
        vocabulary: Entries of the student's vocabulary; None: unknown.
    """
    where = f"teacher.stored={folder}"
    if not Path(os.path.expanduser(folder)).is_dir():
        return [f"{where}: no such folder; write it with scripts/teacher.py run.dir={folder}"]
    files = [teacher_file(folder, split) for split in SPLITS]
    if missing := [file.name for file in files if not file.exists()]:
        return [
            f"{where}: has no {' and no '.join(missing)}; it must be the run directory of a scripts/teacher.py that "
            "ran to its end; start an interrupted one again with the same command"
        ]
    problems = []
    for file in files:
        try:
            header = read_teacher_file(file).header
        except (OSError, ValueError) as error:
            problems.append(
                f"{where}: {file.name} cannot be read ({error}); remove it, and run scripts/teacher.py again"
            )
        else:
            problems += mismatches(folder, header, temperature, vocabulary)
    return list(dict.fromkeys(problems))


def mismatches(folder: str, header: TeacherHeader, temperature: float, vocabulary: int | None) -> list[str]:
    """Return the differences between a file and the distillation that uses it, besides those of the data."""
    again = "store them again with scripts/teacher.py"
    problems = []
    if header.temperature != temperature:
        problems.append(
            f"objective.temperature={temperature:g}: the probabilities in teacher.stored={folder} are at temperature "
            f"{header.temperature:g}, and cannot be converted; set objective.temperature={header.temperature:g}, or "
            f"{again} objective.temperature={temperature:g}"
        )
    if vocabulary not in (None, header.vocabulary):
        problems.append(
            f"teacher.stored={folder}: its probabilities are over a vocabulary of {header.vocabulary:,} entries, but "
            f"the student's has {vocabulary:,}; set model.path to a student with {header.vocabulary:,} entries, or "
            f"{again} and this student"
        )
    return problems


def rejected_file(folder: str, split: str, why: str) -> ConfigError:
    """Return the error for a file that does not fit the run's data or tokenizer."""
    return ConfigError(f"teacher.stored={folder}: {teacher_file(folder, split).name} {why}")
