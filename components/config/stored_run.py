"""A run as its files describe it: metrics.jsonl, and the figures of tables of sweeps and comparisons.

run = read_run(Path("outputs/finetune/RUN"))
print(run.recipe, run.model, run.steps, run.eval_loss)

metrics.jsonl has one strict JSON object per line. The last field of a line, `check`, is the line number and the CRC-32
of that number and the text before the field. It detects modified lines, and missing lines between two others. NaN and
infinite values are stored as null; the field `nonfinite` maps their keys to the values.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from components.config.schema.data import DataConfig, RowsDataConfig, TokensDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.parallelism import MeshShape
from components.protocol.run_files import (
    CHECKPOINTS,
    CONFIG,
    NONFINITE,
    RECORD,
    atomic_file,
    checkpoint_folders,
    checkpoint_step,
    disk_errors_named,
    finite,
    keep_only_file,
    open_append,
    read_json,
    read_result,
)
from components.protocol.safe_parsing import load_yaml, parse_json, read_regular

METRICS, _DAMAGED = "metrics.jsonl", "metrics.jsonl.damaged"
CHECK = "check"
STEP_KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", CHECK, NONFINITE}
"""Keys of a step's line that no other metric may have."""
_EVALUATED = {"eval_loss", "eval_reward"}
"""Keys of which the line of an evaluation has one."""
_CHECK = re.compile(rf', "{CHECK}": "(\d{{1,18}})-([0-9a-f]{{8}})"\}}$')
_JOINT = re.compile(rb'(?<=\})[^{}"]{0,3}(?=\{)')
"""Boundary of two lines whose newline was lost or overwritten."""


@dataclass(kw_only=True, slots=True)
class RunNumbers:
    """A run's config and its final numbers; None where the run did not record one."""

    result: dict[str, Any] = field(default_factory=dict)
    """Contents of its result.json; empty if there is none yet."""
    config: dict[str, Any] = field(default_factory=dict)
    """Contents of its config.yaml, sections by name."""

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens per second over all processes."""
        return self._finite("tokens_per_second")

    @property
    def peak_memory_gib(self) -> float | None:
        """Peak memory of rank 0."""
        return self._gib("peak_memory_bytes")

    @property
    def peak_reserved_gib(self) -> float | None:
        """Peak memory reserved by torch's allocator on rank 0's GPU; None on CPUs."""
        return self._gib("peak_reserved_bytes")

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss at the end; None if it is missing or not finite."""
        return self._finite("eval_loss")

    @property
    def eval_accuracy(self) -> float | None:
        """Held-out accuracy at the end."""
        return self._finite("eval_accuracy")

    @property
    def eval_reward(self) -> float | None:
        """Held-out reward at the end; None if it is missing or not finite."""
        return self._finite("eval_reward")

    def _finite(self, key: str) -> float | None:
        value = self.result.get(key)
        return value if is_number(value) and math.isfinite(value) else None

    def _gib(self, key: str) -> float | None:
        value = self._finite(key)
        return None if value is None else value / 2**30


@dataclass(kw_only=True, slots=True)
class StoredRun(RunNumbers):
    """A run directory's config, result, provenance and metrics. Numbers without a result come from the metrics."""

    directory: Path
    record: dict[str, Any] = field(default_factory=dict)
    """Contents of its environment.json."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Objects in its metrics.jsonl."""

    @property
    def recipe(self) -> str:
        """Name of the recipe; empty if it is unknown."""
        return str(self.record.get("recipe") or "")

    @property
    def model(self) -> str:
        """Name of the model; empty if it is unknown."""
        section = self.config.get("model")
        if not isinstance(section, dict):
            return ""
        path, config = section.get("path"), section.get("config")
        return model_name(
            path if isinstance(path, str) else None, config if isinstance(config, dict) else {}, section.get("init")
        )

    @property
    def mesh(self) -> str:
        """Mesh axes larger than 1; empty if the mesh is unknown."""
        return short_mesh(str(self.result.get("mesh") or ""))

    @property
    def steps(self) -> int | None:
        """Completed optimizer steps, or the last one that was logged."""
        steps = self.result.get("steps")
        return steps if type(steps) is int else max((line["step"] for line in self.lines), default=None)

    @property
    def tokens(self) -> int | None:
        """Target tokens up to the last step that was logged."""
        return self.last("tokens")

    @property
    def improves(self) -> str:
        """Metric that the run improves: reward, the higher the better, or loss."""
        return "reward" if has_rewards(self.lines) else "loss"

    def best(self, metric: str) -> float | None:
        """Return the highest reward or the lowest loss that was logged in a step."""
        values = [value for _, value in self.curve(metric) if math.isfinite(value)]
        return (max if metric == "reward" else min)(values, default=None)

    @property
    def speed(self) -> float | None:
        """Target tokens per second; without a result, the median of the log intervals after the first."""
        speeds = [value for _, value in self.curve("tokens_per_second")]
        return self.tokens_per_second or (statistics.median(speeds[1:] or speeds) if speeds else None)

    @property
    def wall_seconds(self) -> float | None:
        """Seconds of the last attempt, without a result up to the last line of its metrics."""
        if is_number(seconds := self.result.get("wall_seconds")):
            return seconds
        try:
            started = datetime.fromisoformat(str(self.record.get("started")))
            seconds = (self.directory / METRICS).stat().st_mtime - started.timestamp()
        except (ValueError, OSError):
            return None
        return seconds if seconds > 0 else None

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Return the (step, value) pairs of a metric, in logged order."""
        return [(line["step"], line[metric]) for line in self.lines if is_number(line.get(metric))]

    def last(self, metric: str) -> Any:
        """Return the last value of a metric; None if it was never logged."""
        values = self.curve(metric)
        return values[-1][1] if values else None

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that were logged."""
        return {key for line in self.lines for key in line if key != "step" and is_number(line[key])}


def has_rewards(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the objects of metrics.jsonl are of a run whose reward is to be maximized.

    A run whose evaluations have a loss is none: its `reward` is a metric beside the loss, as in KTO.
    """
    names = {name for line in lines for name in ("reward", "eval_reward", "eval_loss") if name in line}
    return bool(names) and "eval_loss" not in names


def read_run(directory: Path) -> StoredRun:
    """Return what a run directory stores; a file that is missing or cannot be read counts as empty."""
    try:
        lines = MetricsLog(directory).read()
    except OSError:
        lines = []
    return StoredRun(
        directory=directory,
        result=read_result(directory),
        config=read_config(directory),
        record=read_json(directory / RECORD),
        lines=lines,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Return the sections of a run's config.yaml; empty if it is missing or cannot be read."""
    try:
        config = load_yaml(read_regular(directory / CONFIG).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a config, such as optimizer.lr, with their values as text."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def model_name(path: str | None, config: Mapping[str, Any], init: object = None) -> str:
    """Return the name of a model: that of its folder or file, or its type if there is none; init: `model.init`."""
    if path is None:
        return f"{config.get('model_type', 'model')} from scratch"
    return Path(path).name.removesuffix(".gguf") + " from scratch" * (init == "random")


def run_title(model: ModelConfig, data: DataConfig, mesh: MeshShape) -> str:
    """Return the title of a run's pictures: model, data and mesh."""
    source = Path(str((data.path if isinstance(data, RowsDataConfig | TokensDataConfig) else None) or data.kind)).name
    return f"{model_name(model.path, model.config, model.init)} on {source}, {mesh.summary}"


def short_mesh(mesh: str) -> str:
    """Return the axes of a mesh larger than 1, such as "dp_shard=2 x tp=2"; "1" if there are none."""
    axes = [axis for axis in mesh.split(" x ") if axis and not axis.endswith("=1")]
    return " x ".join(axes) or ("1" if mesh else "")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(slots=True)
class _Line:
    text: str
    """Text without the checksum and the closing brace."""
    values: dict[str, Any]


@dataclass(slots=True)
class _Parsed:
    lines: list[_Line] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Messages about missing or damaged lines."""
    number: int = 0
    """Number of the last intact line."""


class MetricsLog:
    """Metrics history of a run. Damaged lines are skipped and reported; `continue_from` moves them to a separate
    file."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS
        self.dropped_steps = 0
        """Steps that `continue_from` dropped, and that the run repeats."""
        self._number: int | None = None  # of the last line; None: the file was not read yet

    def append(self, values: dict[str, Any]) -> None:
        """Append a line. Raises OSError, which states the file and the free disk space."""
        with disk_errors_named(self.path), open_append(self.path) as file:
            start = b""
            if self._number is None:
                content = self._content()
                self._number = _parse(content).number
                start = b"" if content[-1:] in (b"", b"\n") else b"\n"
            self._number += 1
            file.write(start + _encode(json.dumps(finite(values), allow_nan=False)[:-1], self._number))

    def read(self) -> list[dict[str, Any]]:
        """Return the values of all intact lines, with NaN and infinities restored."""
        return [_restored(line.values) for line in _parse(self._content()).lines]

    def continue_from(self, step: int) -> list[str]:
        """Drop the lines of later steps, for a run that resumes from `step`; return messages for the log.

        The run repeats the dropped steps, and also the evaluation at `step`, with which every attempt begins, so that
        the file remains one curve. Damaged lines are moved to metrics.jsonl.damaged.
        """
        keep_only_file(self.path)
        parsed = _parse(self._content())
        if not (parsed.lines or parsed.damaged) and self._has_saved(step):
            return [f"{METRICS} is missing or empty: the history of steps 1 to {step} is lost"]
        kept = [line for line in parsed.lines if line.values["step"] < step + (not _EVALUATED & line.values.keys())]
        messages = list(parsed.problems)
        repeated = [
            line.values["step"] for line in parsed.lines if "loss" in line.values and line.values["step"] > step
        ]
        self.dropped_steps = max(repeated, default=step) - step
        if repeated:
            messages.append(f"steps {min(repeated)} to {max(repeated)} in {METRICS} are dropped: the run repeats them")
        messages += _missing_end([line.values["step"] for line in kept if "loss" in line.values], step)
        if parsed.damaged:
            with disk_errors_named(self.path), open_append(self.path.with_name(_DAMAGED)) as file:
                file.write(b"".join(line + b"\n" for line in parsed.damaged))
        if not self.path.exists():
            return messages
        with disk_errors_named(self.path), atomic_file(self.path) as new:
            new.write(b"".join(_encode(line.text, number) for number, line in enumerate(kept, 1)))
        self._number = len(kept)
        return messages

    def _content(self) -> bytes:
        try:
            return b"" if self.path.is_symlink() else read_regular(self.path)
        except (FileNotFoundError, IsADirectoryError):
            return b""

    def _has_saved(self, step: int) -> bool:
        """Return whether this run itself, and not the run of a checkpoint that it started from, saved this step."""
        saved = (checkpoint_step(folder.name) for folder in checkpoint_folders(self.path.parent / CHECKPOINTS))
        return step > 0 and step in saved


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
        parsed.problems.insert(0, f"{METRICS} holds {lines}: moved to {_DAMAGED}")
    return parsed


def _take(parsed: _Parsed, raw: bytes, unseen: int) -> int:
    """Add a line to `parsed`; return the number of damaged lines since the last intact one.

    `unseen` is that number before this line; a damaged line accounts for one missing line number.
    """
    values, text = _values_of(raw), raw.decode(errors="replace")
    match = _CHECK.search(text)
    number, text = (int(match[1]), text[: match.start()]) if match else (0, text)
    if values is None or match is None or match[2] != _checksum(text, number) or number <= parsed.number:
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
    """Return the values of a line, or None unless it is a JSON object with an integer `step`."""
    try:
        values = parse_json(raw)
    except ValueError:
        return None
    return values if isinstance(values, dict) and type(values.get("step")) is int else None


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    nonfinite = values.get(NONFINITE, {})
    kept = {key: value for key, value in values.items() if key not in (NONFINITE, CHECK)}
    return kept | {key: float(value) for key, value in nonfinite.items()}


def _missing_end(steps: list[int], resumed: int) -> list[str]:
    """Return a message if lines are missing between the last one and the resumed step, judged by the logging
    interval."""
    distance = steps[-1] - steps[-2] if len(steps) > 1 else sum(steps)
    if steps and resumed >= steps[-1] + distance:
        return [f"{METRICS} ends with step {steps[-1]}: the history of the steps up to {resumed} is lost"]
    return []
