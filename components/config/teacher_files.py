"""Headers of the files with a teacher's most likely tokens, which scripts/teacher.py writes for recipes/distill.py.

Each is a safetensors file with one entry per target token of a split, in the order of its rows.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from components.protocol.safe_parsing import parse_json
from components.storage.tensor_files import BlockHashes, OpenFile, StoredTensor, TensorEntry, read_header

_SPLITS = ("train", "eval")
TOKEN_IDS, LOG_PROBS = "teacher_token_ids", "teacher_log_probs"
"""Tensors of a file, and names in `Batch.token_values`, of the teacher's most likely tokens (targets, k) int32, and of
the log-probabilities of these and of all other tokens together (targets, k + 1) float32."""
TARGET_LOG_PROB = "teacher_target_log_prob"
"""Tensor and name of the teacher's log-probability of the target (targets,) float32, at temperature 1."""
STARTS = "starts"
"""Tensor with the number of targets before each row, (rows + 1,) int64."""
METADATA, HASHES = "teacher", "hashes"
"""Keys in a file's metadata of the JSON texts of a `TeacherHeader` and of the hashes of the blocks of each tensor."""
REMEDY = "remove it, and run scripts/teacher.py again"


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


class _TeacherFile(NamedTuple):
    """Header of a file, and where its tensors are."""

    header: TeacherHeader
    content: OpenFile
    tensors: dict[str, StoredTensor]
    hashes: dict[str, str]
    """Hashes of the blocks of each tensor."""


def entries_of(header: TeacherHeader, targets: int, rows: int) -> dict[str, TensorEntry]:
    """Return the tensors of a file. float32: bfloat16 would round log-probabilities by up to 0.4 %, which is more than
    the difference between good students."""
    return {
        TOKEN_IDS: TensorEntry("I32", (targets, header.top_k)),
        LOG_PROBS: TensorEntry("F32", (targets, header.top_k + 1)),
        TARGET_LOG_PROB: TensorEntry("F32", (targets,)),
        STARTS: TensorEntry("I64", (rows + 1,)),
    }


def read_teacher_file(file: Path) -> _TeacherFile:
    """Read the header of a file. Raises OSError if it cannot be read, and ValueError if it is damaged."""
    content = OpenFile(file, "stored teacher", REMEDY)
    stored = read_header(content)
    try:
        header = TeacherHeader(**parse_json(stored.metadata[METADATA]))
        hashes = parse_json(stored.metadata[HASHES])
        targets, rows = stored.tensors[TARGET_LOG_PROB].shape[0], stored.tensors[STARTS].shape[0] - 1
    except (LookupError, TypeError) as error:
        raise ValueError("it was not written by scripts/teacher.py") from error
    texts = (header.samples, header.tokenizer, header.teacher)
    if not all(isinstance(text, str) for text in texts) or not isinstance(hashes, dict):
        raise ValueError("its description has values that are no texts")
    if type(header.vocabulary) is not int or type(header.top_k) is not int or type(header.temperature) is not float:
        raise ValueError("its description has values that are no numbers")
    if not (1 <= header.top_k <= header.vocabulary and 0 < header.temperature < math.inf):
        raise ValueError(f"it has top_k {header.top_k} of a vocabulary of {header.vocabulary} entries")
    expected = entries_of(header, targets, rows)
    if {name: TensorEntry(*each[:2]) for name, each in stored.tensors.items()} != expected:
        raise ValueError(f"its tensors are not those of top_k {header.top_k} and {targets:,} targets")
    lengths = {name: len(BlockHashes.placeholder(each.bytes)) for name, each in expected.items()}
    if {name: isinstance(each, str) and len(each) for name, each in hashes.items()} != lengths:
        raise ValueError("its hashes are not those of its tensors")
    return _TeacherFile(header, content, stored.tensors, hashes)


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
    files = [teacher_file(folder, split) for split in _SPLITS]
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
            problems.append(f"{where}: {file.name} cannot be read ({error}); {REMEDY}")
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
