"""Early stop of losing points (sweep.early_stop=median): the median rule over the values in their metrics.jsonl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from components.config.compose.sweep_keys import EarlyStop, Goal
from components.config.metrics_log import MetricsLog
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.training import TrainingConfig
from components.config.stored_run import is_number
from components.launch.sweep.plan import Point, Sweep
from components.launch.sweep.point_rows import SweepRow, read_points

FEWEST_ENDED = 4
"""Number of points that must have ended with a value at the same step before another is stopped."""


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

    This is Optuna's MedianPruner. It takes effect once FEWEST_ENDED points have ended with state ok.
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
    if len(others) < FEWEST_ENDED or step >= max(max(each) for each in ended if each):
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
