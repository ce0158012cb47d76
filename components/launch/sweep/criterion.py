"""What makes a point of a sweep the best one: its speed, what it learned, or the metric of sweep.metric."""

from __future__ import annotations

import json
from dataclasses import dataclass

from components.config.compose.sweep_keys import EVAL_LOSS, Goal
from components.launch.sweep.losses import share_one_curve
from components.launch.sweep.plan import Sweep
from components.launch.sweep.point_rows import SweepRow


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
    if share_one_curve(ok):
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
