"""Ranking of the points of a sweep, by losses where they are comparable, and points that are stopped early."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.config.compose.sweep_keys import EVAL_LOSS, EarlyStop, Goal
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.training import TrainingConfig
from components.config.stored_run import MetricsLog, is_number
from components.launch.sweep.plan import Point, Sweep
from components.launch.sweep.point_rows import EARLY_STEPS, SweepRow, read_points

_FREE_SECTIONS = ("parallelism", "cluster", "logging", "checkpoint", "generation")
"""Config sections that do not affect the loss curve."""
_FREE_KEYS = {
    "run": ("dir", "name", "resume"),
    "model": ("loss",),
    "training": ("micro_batch_size", "log_every", "eval_every", "gc_every"),
    "evaluation": ("micro_batch_size",),
    "peft": ("export",),
}
"""Keys of other sections that do not affect the loss curve."""
BEFORE, AFTER = ("first_eval_loss", "first_loss"), ("last_loss", "eval_loss")
"""Keys of result.json: held-out and training loss at the start, training and held-out loss at the end."""
_EARLY = "loss of step "
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Allowed relative difference between losses of one curve, by matmul dtype."""
_LOOSEST = 2e-2
"""Allowed relative difference for 16-bit and unknown dtypes, and for final losses after more than EARLY_STEPS: training
amplifies rounding differences even between correct meshes. The early steps in metrics.jsonl are compared with
_TOLERANCES."""
_FEWEST_ENDED = 4
"""Number of points that must have ended with a value at the same step before another is stopped."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A metric by which points are compared."""

    metric: str
    """Its name in metrics.jsonl or result.json."""
    goal: Goal
    label: str
    """Its name in tables."""

    def score(self, row: SweepRow) -> float | None:
        """Return the value to maximize; None if the point did not measure it, or if it is not finite."""
        value = row.number(self.metric)
        return -value if value is not None and self.goal is Goal.min else value


SPEED = Criterion("tokens_per_second", Goal.max, "tokens/s")

LOSS = Criterion(EVAL_LOSS, Goal.min, "held-out loss")

ACCURACY = Criterion("eval_accuracy", Goal.max, "held-out accuracy")


def choose_criterion(sweep: Sweep, ok: list[SweepRow]) -> Criterion | None:
    """Return what ok points are compared by; None if nothing makes them comparable.

    A study is judged by sweep.metric. With its default, the points of another sweep are compared by speed if they train
    one curve, else by what they learned. Held-out losses are comparable only for the same objective and data,
    accuracies for the same data.
    """
    if judged_by_metric(sweep):
        known = next((each for each in (SPEED, LOSS, ACCURACY) if each.metric == sweep.metric), None)
        return Criterion(sweep.metric, sweep.goal, known.label if known else sweep.metric)
    if _share_one_curve(ok):
        return SPEED
    sections = {name: {_text(row.config.get(name)) for row in ok} for name in ("objective", "data")}
    if len(sections["data"]) > 1:
        return None
    shares_objective = len(sections["objective"]) == 1
    if shares_objective and all(row.eval_loss is not None for row in ok):
        return LOSS
    if all(row.eval_accuracy is not None for row in ok):
        return ACCURACY
    return LOSS if shares_objective and any(row.eval_loss is not None for row in ok) else None


def judged_by_metric(sweep: Sweep) -> bool:
    """Return whether the points are compared by sweep.metric, whatever they have in common."""
    return sweep.metric != EVAL_LOSS or sweep.study is not None


def missing_metric(sweep: Sweep, criterion: Criterion | None, ok: list[SweepRow]) -> str:
    """Return the problem of a sweep.metric that no ok point has; empty if there is none."""
    if not judged_by_metric(sweep) or criterion is None or not ok:
        return ""
    if any(criterion.score(row) is not None for row in ok):
        return ""
    names = sorted({name for row in ok for name in row.numbers()})
    return f"sweep.metric={criterion.metric}: no point has this metric; choose from: {', '.join(names) or 'none'}"


def _text(section: object) -> str:
    return json.dumps(section, sort_keys=True, default=str)


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
            curves[json.dumps(_curve_config(row.config), sort_keys=True, default=str)].append(row)
    compared = [curve for curve in curves.values() if len(curve) > 1]
    found = Agreement()
    if not compared:
        found.notes.append("losses: not compared, since no two ok points should train the same curve")
    for curve in compared:
        _compare(curve, found)
    return found


def _share_one_curve(rows: list[SweepRow]) -> bool:
    """Return whether the configs of all points determine the same loss curve; such points differ only in speed."""
    return len({json.dumps(_curve_config(row.config), sort_keys=True, default=str) for row in rows}) <= 1


def _curve_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that determines the loss curve, without where and how it is computed."""
    kept = {}
    for name, values in config.items():
        if name not in _FREE_SECTIONS and isinstance(values, dict):
            free = _FREE_KEYS.get(name, ())
            kept[name] = {key: value for key, value in values.items() if key not in free}
    return kept


def tolerance(row: SweepRow) -> tuple[float, str]:
    """Return the allowed relative difference of a point's losses, and its matmul dtype."""
    dtype = row.result.get("compute_dtype") or "unknown dtype"
    return _TOLERANCES.get(dtype, _LOOSEST), dtype


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
    return [*BEFORE, *(f"{_EARLY}{step}" for step in steps), *AFTER]


def _differences(row: SweepRow, other: SweepRow) -> list[str]:
    return [name for name in _compared(row, other) if not _distance(row, other, name) <= _allowed(row, other, name)[0]]


def _allowed(row: SweepRow, other: SweepRow, name: str) -> tuple[float, str]:
    allowed, dtype = max(tolerance(row), tolerance(other))
    is_late = name in AFTER and max(each.result.get("steps") or 0 for each in (row, other)) > EARLY_STEPS
    return (max(allowed, _LOOSEST) if is_late else allowed), dtype


def _loss(row: SweepRow, name: str) -> Any:
    return row.early_losses[int(name.removeprefix(_EARLY))] if name.startswith(_EARLY) else row.result.get(name)


def _distance(row: SweepRow, other: SweepRow, name: str) -> float:
    """Return the relative difference of a loss; inf if only one of the two is finite."""
    mine, theirs = _loss(row, name), _loss(other, name)
    numbers = [value is not None and math.isfinite(value) for value in (mine, theirs)]
    if not all(numbers):
        return math.inf if any(numbers) else 0.0
    return abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-12)


def early_stop_problems(cfg: RecipeConfig, metric: str, rule: EarlyStop | None) -> list[str]:
    """Require several evaluations during a run if the metric is measured by evaluations."""
    training = section(cfg, TrainingConfig)
    if rule is None or training is None or not metric.startswith("eval"):
        return []
    every, steps = training.eval_every, training.max_steps
    if every > 0 and (steps is None or every < steps):
        return []
    last = "" if steps is None else f", less than training.max_steps={steps}"
    return [
        f"training.eval_every={every}: sweep.early_stop={rule} compares {metric} during the runs; set it to a number "
        f"of steps greater than 0{last}, or remove sweep.early_stop"
    ]


class MedianRule:
    """Stop a point whose best value so far is worse than the median of the ended points at the same step.

    This is Optuna's MedianPruner. It takes effect once _FEWEST_ENDED points have ended with state ok.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._ended: dict[int, dict[int, float]] = {}  # number of a point -> its curve
        for row in read_points(sweep):
            self.add(row)

    def add(self, row: SweepRow) -> None:
        """Add a point that has ended, unless it is not ok."""
        if row.state == "ok":
            self._ended[row.point.number] = read_curve(self._sweep, row.point)

    def reason(self, point: Point) -> str:
        """Return why a running point should be stopped; empty if it should not."""
        return losing(read_curve(self._sweep, point), list(self._ended.values()), self._sweep.metric, self._sweep.goal)


def losing(curve: Mapping[int, float], ended: Sequence[Mapping[int, float]], metric: str, goal: Goal) -> str:
    """Return why a curve loses against those of ended points; empty if it does not.

    Args:
        curve: Step -> value of the metric, of a running point.
        ended: The same of the ended points.
        metric: Name of the metric.
        goal: Whether lower or higher values are better.
    """
    if not curve:
        return ""
    step = max(curve)
    others = [each[step] for each in ended if math.isfinite(each.get(step, math.nan))]
    if len(others) < _FEWEST_ENDED or step >= max(max(each) for each in ended if each):
        return ""
    median, known = statistics.median(others), [value for value in curve.values() if math.isfinite(value)]
    if not known:
        return f"{metric} is {curve[step]} at step {step}"
    best = min(known) if goal is Goal.min else max(known)
    if best <= median if goal is Goal.min else best >= median:
        return ""
    return f"{metric} is {best:.4g} at best up to step {step}; the median of {len(others)} points there is {median:.4g}"


def read_curve(sweep: Sweep, point: Point) -> dict[int, float]:
    """Return the values of the sweep's metric by step in a point's metrics.jsonl, without those before the first
    step."""
    try:
        lines = MetricsLog(sweep.run_dir(point)).read()
    except OSError:
        return {}
    metric = sweep.metric
    return {line["step"]: float(line[metric]) for line in lines if line["step"] > 0 and is_number(line.get(metric))}
