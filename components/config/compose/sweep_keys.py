"""Keys of a sweep itself (`sweep.metric=tokens_per_second`), which need -m, and values that Hydra's grammar lacks.

optimizer.lr=log(1e-5,1e-3,5)       5 values with equal ratios, from 1e-5 to 1e-3
optimizer.lr=lin(1e-5,1e-3,5)       5 values with equal differences
optimizer.lr=loguniform(1e-5,1e-3)  a random value per draw (sweep.draws=N), uniform in its logarithm
optimizer.lr=uniform(1e-5,1e-3)     a random value per draw

They are replaced by lists of values (optimizer.lr=1e-5,...) before Hydra parses the command line. In a study
(sweep.trials=N), the last two are ranges, and the list holds their ends. Keys of whole numbers get whole numbers.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydra.errors import HydraException

from components.config.compose.explain import SWEEP_FUNCTION, override_parts, unreadable
from components.config.compose.sources import parsed
from components.config.compose.typed import typed
from components.protocol.errors import ConfigError, at_least, raise_all

_PREFIX = "sweep."
EVAL_LOSS = "eval_loss"
"""Default of sweep.metric."""
_MINIMIZED = ("loss", "divergence", "perplexity", "seconds", "bytes")
_MAXIMIZED = ("accuracy", "margin", "mfu", "reward", "tokens_per_second")
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
    one curve are compared by tokens/s, others by held-out loss or reward, or by held-out accuracy if their objectives
    differ. A study of runs with rewards needs eval_reward."""
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
        return self.goal or _known_goal(self.metric) or Goal.min


@dataclass(kw_only=True, slots=True)
class _Keys:
    """Root of the keys, for messages with their full names."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


def is_sweep_key(override: str) -> bool:
    """Return whether an override sets a key of the sweep."""
    return override.lstrip("+~").startswith(_PREFIX)


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
            given = parsed(override)
        except HydraException:
            problems.append(unreadable(override))
            continue
        if not assigned or given.is_delete() or given.is_sweep_override():
            problems.append(f"{override}: is a key of the sweep itself; set one value")
        else:
            values[key.removeprefix(_PREFIX)] = given.value()
    try:
        return typed({"sweep": values}, _Keys).sweep, problems
    except ConfigError as error:
        return SweepConfig(), problems + error.problems


def _known_goal(metric: str) -> Goal | None:
    """Return whether lower or higher values are better, by the name of a metric; None if it is unknown."""
    for goal, names in ((Goal.min, _MINIMIZED), (Goal.max, _MAXIMIZED)):
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
    if goal is None and _known_goal(metric) is None:
        return [f"sweep.metric={metric}: the better value of this metric is unknown; add sweep.goal=min or max"]
    if metric == EVAL_LOSS and goal is Goal.max:
        return [f"sweep.goal=max: a lower {EVAL_LOSS} is better; remove sweep.goal, or set another sweep.metric"]
    return []


_SPACED = ("log", "lin")
_DIGITS = 5
"""Significant digits of computed values, which are also in the names of run directories."""
_MOST_VALUES = 1000
"""Maximum number of values of one key."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`."""

    low: float
    high: float
    log: bool
    """Whether equal ratios are equally likely, instead of equal differences."""
    whole: bool = False
    """Whether only its whole numbers are values."""


@dataclass(frozen=True, slots=True)
class ListedValues:
    """Overrides in Hydra's grammar."""

    overrides: list[str] = field(default_factory=list)
    drawn: set[str] = field(default_factory=set)
    """Overrides with one random value per point."""
    ranges: dict[str, Range] = field(default_factory=dict)
    """Overrides whose values are the ends of a range -> the range."""
    problems: list[str] = field(default_factory=list)


def list_values(
    overrides: Iterable[str], keys: SweepConfig, whole_keys: Collection[str] = (), *, only_ends: bool = False
) -> ListedValues:
    """Replace these functions by the lists of their values.

    Random values depend only on sweep.seed and the key, so that sweeping another key too does not change them.

    Args:
        overrides: The overrides of the command line.
        keys: Keys of the sweep.
        whole_keys: Keys whose values are whole numbers.
        only_ends: List the ends of ranges, as for a study, since the keys of the sweep were rejected.
    """
    listed = ListedValues()
    for override in overrides:
        match = SWEEP_FUNCTION.fullmatch(override)
        if match is None:
            listed.overrides.append(override)
            continue
        key, name = match["key"], match["name"]
        arguments = [each.strip() for each in match["arguments"].split(",")]
        whole = name not in _SPACED and key.lstrip("+").strip() in whole_keys
        if problem := _problem(override, name, arguments, whole=whole):
            listed.problems.append(problem)
        elif name in _SPACED:
            listed.overrides.append(f"{key}={','.join(_spaced(name, *arguments))}")
        elif keys.trials is not None or only_ends:
            span = _range(name, arguments, whole=whole)
            listed.overrides.append(f"{key}={span.low},{span.high}" if whole else f"{key}={','.join(arguments)}")
            listed.ranges[listed.overrides[-1]] = span
        elif keys.draws is None:
            listed.problems.append(
                f"{override}: is drawn at random; add sweep.draws=N, the number of points to draw, or sweep.trials=N, "
                "the number of points of an Optuna study"
            )
        else:
            values = _random_values(_range(name, arguments, whole=whole), keys.draws, _generator(keys, key))
            listed.overrides.append(f"{key}={','.join(values)}")
            listed.drawn.add(listed.overrides[-1])
    return listed


def draw_points(
    columns: Mapping[str, Sequence[str]], drawn: Collection[str], keys: SweepConfig, draws: int
) -> list[list[str]]:
    """Return the overrides of random points.

    Args:
        columns: The override of each swept key -> its overrides with single values.
        drawn: The overrides whose values are random already, one per point. The values of the others are chosen at
            random; if there are only others, no two points are equal.
        keys: Keys of the sweep.
        draws: Number of points; without random values at most `combinations(columns)`.
    """
    if not drawn:
        chosen = random.Random(keys.seed).sample(range(combinations(columns)), draws)
        return [_combination(list(columns.values()), number) for number in chosen]
    per_key = [
        values if override in drawn else _generator(keys, override.partition("=")[0]).choices(values, k=draws)
        for override, values in columns.items()
    ]
    return [list(point) for point in zip(*per_key, strict=True)]


def combinations(columns: Mapping[str, Sequence[str]]) -> int:
    """Return the number of points of the full grid."""
    return math.prod(len(values) for values in columns.values())


def _combination(columns: Sequence[Sequence[str]], number: int) -> list[str]:
    """Return one point of the full grid, in whose numbering the last key changes fastest."""
    point = []
    for values in reversed(columns):
        number, index = divmod(number, len(values))
        point.append(values[index])
    return point[::-1]


def _range(name: str, arguments: Sequence[str], *, whole: bool) -> Range:
    low, high = (int(float(argument)) if whole else float(argument) for argument in arguments)
    return Range(low, high, log=name == "loguniform", whole=whole)


def _problem(override: str, name: str, arguments: Sequence[str], *, whole: bool) -> str:
    """Return the rule that the arguments of a function violate; empty if they are valid."""
    positive = " greater than 0" if name.startswith("log") else ""
    if name in _SPACED:
        message = (
            f"{override}: write {name}(FIRST,LAST,COUNT) with two different numbers{positive} and 2 to {_MOST_VALUES} "
            "values"
        )
        if len(arguments) != 3 or not arguments[2].isdecimal() or not 2 <= int(arguments[2]) <= _MOST_VALUES:
            return message
    else:
        numbers = "whole numbers" if whole else "numbers"
        message = f"{override}: write {name}(LOW,HIGH) with {numbers}{positive}, LOW less than HIGH"
        if len(arguments) != 2:
            return message
    try:
        first, last = (float(argument) for argument in arguments[:2])
    except ValueError:
        return message
    in_order = first != last if name in _SPACED else first < last
    is_valid = in_order and math.isfinite(first) and math.isfinite(last) and not (positive and min(first, last) <= 0)
    if whole and not (first.is_integer() and last.is_integer()):
        return message
    return "" if is_valid else message


def _spaced(name: str, first: str, last: str, count: str) -> list[str]:
    """Return the values of log(...) or lin(...); the first and the last as they were typed."""
    low, high, steps = float(first), float(last), int(count) - 1
    if name == "log":
        between = [low * (high / low) ** (step / steps) for step in range(1, steps)]
    else:
        between = [low + (high - low) * (step / steps) for step in range(1, steps)]
    return [first, *map(number_as_value, between), last]


def _random_values(span: Range, count: int, generator: random.Random) -> list[str]:
    if span.log:
        values = [math.exp(generator.uniform(math.log(span.low), math.log(span.high))) for _ in range(count)]
        return [number_as_value(round(value) if span.whole else value) for value in values]
    if span.whole:
        return [str(generator.randint(int(span.low), int(span.high))) for _ in range(count)]
    return [number_as_value(generator.uniform(span.low, span.high)) for _ in range(count)]


def _generator(keys: SweepConfig, key: str) -> random.Random:
    return random.Random(f"{keys.seed} {key}")


def number_as_value(value: float) -> str:
    """Return a value with _DIGITS digits; a whole number in full, so that keys of whole numbers accept it."""
    whole = round(value)
    return str(whole) if abs(value - whole) <= 1e-9 * abs(value) else f"{value:.{_DIGITS}g}"
