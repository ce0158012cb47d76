"""A run as its files describe it, for tables of sweeps and comparisons. Runs that are running or failed have some.

run = read_run(Path("outputs/finetune/RUN"))
print(run.recipe, run.model, run.steps, run.eval_loss)
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from components.config.metrics_log import METRICS, MetricsLog
from components.config.safe_yaml import load_yaml
from components.protocol.run_files import CONFIG, RECORD, read_json, read_result
from components.protocol.safe_json import read_regular


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
    def best_loss(self) -> float | None:
        """Lowest training loss that was logged."""
        return min((value for _, value in self.curve("loss") if math.isfinite(value)), default=None)

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


def short_mesh(mesh: str) -> str:
    """Return the axes of a mesh larger than 1, such as "dp_shard=2 x tp=2"; "1" if there are none."""
    axes = [axis for axis in mesh.split(" x ") if axis and not axis.endswith("=1")]
    return " x ".join(axes) or ("1" if mesh else "")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
