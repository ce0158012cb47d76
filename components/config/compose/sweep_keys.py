"""Keys of a sweep itself (`sweep.metric=tokens_per_second`), which belong to no run and need -m."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from components.config.compose.explain import override_parts, unreadable
from components.config.compose.typed import typed
from components.config.errors import ConfigError
from components.config.schema.checks import at_least, raise_all

PREFIX = "sweep."
EVAL_LOSS = "eval_loss"
"""Default of sweep.metric."""
MINIMIZED = ("loss", "perplexity", "seconds", "bytes")
MAXIMIZED = ("accuracy", "margin", "mfu", "tokens_per_second")
"""Last words of the names of metrics that are better if they are lower or higher: eval_loss, eval_accuracy."""


class Goal(StrEnum):
    """Whether lower or higher values of a metric are better."""

    min = "min"
    max = "max"


class EarlyStop(StrEnum):
    """Rules that stop losing points."""

    median = "median"


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """How the points of a sweep are chosen and judged."""

    metric: str = EVAL_LOSS
    """Metric of metrics.jsonl or result.json, whose last value makes a point the best one. eval_loss: points that train
    one curve are compared by tokens/s, others by held-out loss, or by held-out accuracy if their objectives differ."""
    goal: Goal | None = None
    """min or max; null: inferred from the name of the metric."""
    draws: int | None = None
    """Number of random points, at least 2. A key with loguniform(LOW,HIGH) or uniform(LOW,HIGH) gets a new value in
    each, another one of its listed values. null: all combinations of the listed values."""
    trials: int | None = None
    """Number of points of an Optuna study, at least 2. It chooses each point by the results of the earlier ones: a
    value of loguniform(LOW,HIGH) or uniform(LOW,HIGH), or one of the listed values. null: no study."""
    seed: int = 0
    """Seed of the random points, and of the study."""
    parallel: int | None = None
    """Points that run at the same time, at least 1. On this machine they share its CPU cores and GPUs, whose number
    must be divisible by it; on a cluster it is the number of unfinished jobs. null: 1, but without a study all jobs
    of a cluster are submitted at once."""
    early_stop: EarlyStop | None = None
    """median: stop a point whose best value of sweep.metric is worse than the median of the ended points at the same
    step, once 4 have ended (Optuna's MedianPruner). It saves a checkpoint. null: never."""

    def __post_init__(self) -> None:
        raise_all(
            _goal_problems(self.metric, self.goal)
            + at_least("sweep.draws", self.draws, 2)
            + at_least("sweep.trials", self.trials, 2)
            + at_least("sweep.seed", self.seed, 0)
            + at_least("sweep.parallel", self.parallel, 1)
            + _study_problems(self.trials, self.draws)
        )

    @property
    def direction(self) -> Goal:
        """The given or the inferred goal."""
        return self.goal or known_goal(self.metric) or Goal.min


@dataclass(kw_only=True, slots=True)
class _Keys:
    """Root of the keys, for messages with their full names."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


def is_sweep_key(override: str) -> bool:
    """Return whether an override sets a key of the sweep."""
    return override.lstrip("+~").startswith(PREFIX)


def needs_multirun(override: str) -> str:
    """Return the message for a key of a sweep on a command line that starts one run."""
    return f"{override}: is a key of a sweep, not of a run; add -m and a key with several values, or remove it"


def read_sweep_keys(overrides: Iterable[str]) -> tuple[SweepConfig, list[str]]:
    """Return the keys of a sweep, with the defaults of those that are wrong, and the problems."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    for override in overrides:
        key, assigned, _ = override_parts(override)
        try:
            parsed = OverridesParser.create().parse_override(override)
        except HydraException:
            problems.append(unreadable(override))
            continue
        if not assigned or parsed.is_delete() or parsed.is_sweep_override():
            problems.append(f"{override}: is a key of the sweep itself; set one value")
        else:
            values[key.removeprefix(PREFIX)] = parsed.value()
    try:
        return typed({"sweep": values}, _Keys).sweep, problems
    except ConfigError as error:
        return SweepConfig(), problems + error.problems


def known_goal(metric: str) -> Goal | None:
    """Return whether lower or higher values are better, by the name of a metric; None if it is unknown."""
    for goal, names in ((Goal.min, MINIMIZED), (Goal.max, MAXIMIZED)):
        if any(metric == name or metric.endswith(f"_{name}") for name in names):
            return goal
    return None


def _study_problems(trials: int | None, draws: int | None) -> list[str]:
    if trials is None:
        return []
    if draws is not None:
        return [f"sweep.trials={trials}: the study chooses the points; remove sweep.draws={draws}, or sweep.trials"]
    if importlib.util.find_spec("optuna") is None:
        return [
            f"sweep.trials={trials}: optuna is not installed; run pip install 'meshbook[optuna]', or set sweep.draws "
            "instead, which draws all points at random"
        ]
    return []


def _goal_problems(metric: str, goal: Goal | None) -> list[str]:
    if not metric.strip():
        return [f"sweep.metric='': must be the name of a metric, such as {EVAL_LOSS}"]
    if goal is None and known_goal(metric) is None:
        return [f"sweep.metric={metric}: the better value of this metric is unknown; add sweep.goal=min or max"]
    if metric == EVAL_LOSS and goal is Goal.max:
        return [f"sweep.goal=max: a lower {EVAL_LOSS} is better; remove sweep.goal, or set another sweep.metric"]
    return []
