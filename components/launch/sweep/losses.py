"""A sweep over meshes is a parity check: points that train one curve must agree on it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from components.launch.sweep.point_rows import EARLY_STEPS, SweepRow

FREE_SECTIONS = ("parallelism", "cluster", "logging", "checkpoint", "generation")
"""Sections of the config that leave the curve as it is."""
FREE_KEYS = {
    "run": ("dir", "name", "resume"),
    "model": ("loss",),
    "training": ("micro_batch_size", "log_every", "eval_every", "gc_every"),
    "evaluation": ("micro_batch_size",),
    "peft": ("export",),
}
"""Keys of other sections that leave the curve as it is."""
BEFORE, AFTER = ("first_eval_loss", "first_loss"), ("last_loss", "eval_loss")
"""Of result.json: the held-out loss at the start and the loss of the first step, and both at the end."""
EARLY = "loss of step "
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Relative difference that losses of one curve may have, by the type of the matrix products."""
LOOSEST = 2e-2
"""The same for 16-bit types, where the type is not known, and for losses at the end of more than EARLY_STEPS: training
amplifies rounding, so that right meshes end apart. The early steps in metrics.jsonl are compared by TOLERANCES."""


@dataclass(slots=True)
class Agreement:
    """What the comparison found."""

    disagreeing: set[int] = field(default_factory=set)
    """Numbers of the points whose losses differ from those of the most others of their curve."""
    notes: list[str] = field(default_factory=list)
    """The same in sentences."""


def compare_losses(rows: list[SweepRow]) -> Agreement:
    """Compare the losses of all points that ended well and train one curve."""
    curves: dict[str, list[SweepRow]] = defaultdict(list)
    for row in rows:
        if row.state == "ok" and row.config and any(row.result.get(name) is not None for name in (*BEFORE, *AFTER)):
            curves[json.dumps(defining(row.config), sort_keys=True, default=str)].append(row)
    compared = [curve for curve in curves.values() if len(curve) > 1]
    found = Agreement()
    if not compared:
        found.notes.append("losses: not compared, there are no two ok points that should train the same curve")
    for curve in compared:
        _compare(curve, found)
    return found


def defining(config: dict[str, Any]) -> dict[str, Any]:
    """Return what of a config decides the curve: everything but where and how it is computed."""
    kept = {}
    for section, values in config.items():
        if section not in FREE_SECTIONS and isinstance(values, dict):
            free = FREE_KEYS.get(section, ())
            kept[section] = {key: value for key, value in values.items() if key not in free}
    return kept


def tolerance(row: SweepRow) -> tuple[float, str]:
    """Return how far losses of a point may differ from another's, and the type of its matrix products."""
    dtype = row.result.get("compute_dtype") or "unknown type"
    return TOLERANCES.get(dtype, LOOSEST), dtype


def _compare(curve: list[SweepRow], found: Agreement) -> None:
    """Compare each point with the one that agrees with the most others: the wrong one may be the first."""
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
    """Return the names of all losses of two points that are compared, those of the same early steps among them."""
    steps = sorted(row.early_losses.keys() & other.early_losses.keys())
    return [*BEFORE, *(f"{EARLY}{step}" for step in steps), *AFTER]


def _differences(row: SweepRow, other: SweepRow) -> list[str]:
    return [name for name in _compared(row, other) if not _distance(row, other, name) <= _allowed(row, other, name)[0]]


def _allowed(row: SweepRow, other: SweepRow, name: str) -> tuple[float, str]:
    allowed, dtype = max(tolerance(row), tolerance(other))
    grown = name in AFTER and max(each.result.get("steps") or 0 for each in (row, other)) > EARLY_STEPS
    return (max(allowed, LOOSEST) if grown else allowed), dtype


def _loss(row: SweepRow, name: str) -> Any:
    return row.early_losses[int(name.removeprefix(EARLY))] if name.startswith(EARLY) else row.result.get(name)


def _distance(row: SweepRow, other: SweepRow, name: str) -> float:
    """Relative difference of a loss; inf where only one of the two is a number."""
    mine, theirs = _loss(row, name), _loss(other, name)
    numbers = [value is not None and math.isfinite(value) for value in (mine, theirs)]
    if not all(numbers):
        return math.inf if any(numbers) else 0.0
    return abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-12)
