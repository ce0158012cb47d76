"""Parity check of a sweep over meshes: points that should train the same curve must have equal losses."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from components.launch.sweep.point_rows import EARLY_STEPS, SweepRow

FREE_SECTIONS = ("parallelism", "cluster", "logging", "checkpoint", "generation")
"""Config sections that do not affect the loss curve."""
FREE_KEYS = {
    "run": ("dir", "name", "resume"),
    "model": ("loss",),
    "training": ("micro_batch_size", "log_every", "eval_every", "gc_every"),
    "evaluation": ("micro_batch_size",),
    "peft": ("export",),
}
"""Keys of other sections that do not affect the loss curve."""
BEFORE, AFTER = ("first_eval_loss", "first_loss"), ("last_loss", "eval_loss")
"""Keys of result.json: held-out and training loss at the start, training and held-out loss at the end."""
EARLY = "loss of step "
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Allowed relative difference between losses of one curve, by matmul dtype."""
LOOSEST = 2e-2
"""Allowed relative difference for 16-bit and unknown dtypes, and for final losses after more than EARLY_STEPS: training
amplifies rounding differences even between correct meshes. The early steps in metrics.jsonl are compared with
TOLERANCES."""


@dataclass(slots=True)
class Agreement:
    """Result of the comparison."""

    disagreeing: set[int] = field(default_factory=set)
    """Numbers of the points whose losses differ from the majority of their curve."""
    notes: list[str] = field(default_factory=list)
    """The result as sentences."""


def compare_losses(rows: list[SweepRow]) -> Agreement:
    """Compare the losses of all successful points, grouped by the curve that they should train."""
    curves: dict[str, list[SweepRow]] = defaultdict(list)
    for row in rows:
        if row.state == "ok" and row.config and any(row.result.get(name) is not None for name in (*BEFORE, *AFTER)):
            curves[json.dumps(curve_config(row.config), sort_keys=True, default=str)].append(row)
    compared = [curve for curve in curves.values() if len(curve) > 1]
    found = Agreement()
    if not compared:
        found.notes.append("losses: not compared, since no two ok points should train the same curve")
    for curve in compared:
        _compare(curve, found)
    return found


def share_one_curve(rows: list[SweepRow]) -> bool:
    """Return whether the configs of all points determine the same loss curve; such points differ only in speed."""
    return len({json.dumps(curve_config(row.config), sort_keys=True, default=str) for row in rows}) <= 1


def curve_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that determines the loss curve, without where and how it is computed."""
    kept = {}
    for section, values in config.items():
        if section not in FREE_SECTIONS and isinstance(values, dict):
            free = FREE_KEYS.get(section, ())
            kept[section] = {key: value for key, value in values.items() if key not in free}
    return kept


def tolerance(row: SweepRow) -> tuple[float, str]:
    """Return the allowed relative difference of a point's losses, and its matmul dtype."""
    dtype = row.result.get("compute_dtype") or "unknown dtype"
    return TOLERANCES.get(dtype, LOOSEST), dtype


def _compare(curve: list[SweepRow], found: Agreement) -> None:
    """Compare each point with the one that agrees with most others, since the first one may be the wrong one."""
    reference = max(curve, key=lambda row: sum(not _differences(row, other) for other in curve))
    worst = 0.0
    for row in curve:
        worst = max([worst, *(_distance(row, reference, name) for name in _compared(row, reference))])
        for name in _differences(row, reference):
            allowed, dtype = _allowed(row, reference, name)
            found.disagreeing.add(row.point.number)
            found.notes.append(
                f"losses DISAGREE: {name} of {row.point.name} is {_loss(row, name)}, of {reference.point.name} "
                f"{_loss(reference, name)}: {_distance(row, reference, name):.1e} apart, more than {allowed:.0e} "
                f"({dtype})"
            )
    if any(row.point.number in found.disagreeing for row in curve):
        found.notes.append("one of these meshes is wrong, unless the model has dropout, which differs between meshes")
    else:
        allowed, dtype = max(_allowed(row, reference, BEFORE[0]) for row in curve)
        apart = f"at most {worst:.1e} apart" if worst else "bit-equal"
        names = f"{len(curve)} points" if len(curve) > 4 else ", ".join(row.point.name for row in curve)
        late = max(_allowed(row, reference, AFTER[0])[0] for row in curve)
        until = "" if late == allowed else f"; {late:.0e} after step {EARLY_STEPS}"
        found.notes.append(f"losses agree: {names} train one curve, {apart} (allowed: {allowed:.0e}, {dtype}{until})")


def _compared(row: SweepRow, other: SweepRow) -> list[str]:
    """Return the names of the losses to compare between two points, including those of common early steps."""
    steps = sorted(row.early_losses.keys() & other.early_losses.keys())
    return [*BEFORE, *(f"{EARLY}{step}" for step in steps), *AFTER]


def _differences(row: SweepRow, other: SweepRow) -> list[str]:
    return [name for name in _compared(row, other) if not _distance(row, other, name) <= _allowed(row, other, name)[0]]


def _allowed(row: SweepRow, other: SweepRow, name: str) -> tuple[float, str]:
    allowed, dtype = max(tolerance(row), tolerance(other))
    is_late = name in AFTER and max(each.result.get("steps") or 0 for each in (row, other)) > EARLY_STEPS
    return (max(allowed, LOOSEST) if is_late else allowed), dtype


def _loss(row: SweepRow, name: str) -> Any:
    return row.early_losses[int(name.removeprefix(EARLY))] if name.startswith(EARLY) else row.result.get(name)


def _distance(row: SweepRow, other: SweepRow, name: str) -> float:
    """Return the relative difference of a loss; inf if only one of the two is finite."""
    mine, theirs = _loss(row, name), _loss(other, name)
    numbers = [value is not None and math.isfinite(value) for value in (mine, theirs)]
    if not all(numbers):
        return math.inf if any(numbers) else 0.0
    return abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-12)
