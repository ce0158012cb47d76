"""Values of swept keys that Hydra's grammar lacks: spaced values, and random draws or ranges of a study.

optimizer.lr=log(1e-5,1e-3,5)       5 values with equal ratios, from 1e-5 to 1e-3
optimizer.lr=lin(1e-5,1e-3,5)       5 values with equal differences
optimizer.lr=loguniform(1e-5,1e-3)  a random value per draw (sweep.draws=N), uniform in its logarithm
optimizer.lr=uniform(1e-5,1e-3)     a random value per draw

They are replaced by lists of values (optimizer.lr=1e-5,...) before Hydra parses the command line. In a study
(sweep.trials=N), the last two are ranges, and the list holds their ends. Keys of whole numbers get whole numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from components.config.compose.explain import SWEEP_FUNCTION
from components.config.compose.sweep_keys import SweepConfig

SPACED = ("log", "lin")
DIGITS = 5
"""Significant digits of computed values, which are also in the names of run directories."""
MOST_VALUES = 1000
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
    """Those of them whose values are random, one per point."""
    ranges: dict[str, Range] = field(default_factory=dict)
    """Those of them whose values are the ends of a range, with the range."""
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
        found = SWEEP_FUNCTION.fullmatch(override)
        if found is None:
            listed.overrides.append(override)
            continue
        key, name = found["key"], found["name"]
        arguments = [each.strip() for each in found["arguments"].split(",")]
        whole = name not in SPACED and key.lstrip("+").strip() in whole_keys
        if problem := _problem(override, name, arguments, whole=whole):
            listed.problems.append(problem)
        elif name in SPACED:
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
    low, high = (int(float(each)) if whole else float(each) for each in arguments)
    return Range(low, high, log=name == "loguniform", whole=whole)


def _problem(override: str, name: str, arguments: Sequence[str], *, whole: bool) -> str:
    """Return the rule that the arguments of a function violate; empty if they are valid."""
    positive = " greater than 0" if name.startswith("log") else ""
    if name in SPACED:
        message = (
            f"{override}: write {name}(FIRST,LAST,COUNT) with two different numbers{positive} and 2 to {MOST_VALUES} "
            "values"
        )
        if len(arguments) != 3 or not arguments[2].isdecimal() or not 2 <= int(arguments[2]) <= MOST_VALUES:
            return message
    else:
        numbers = "whole numbers" if whole else "numbers"
        message = f"{override}: write {name}(LOW,HIGH) with {numbers}{positive}, LOW less than HIGH"
        if len(arguments) != 2:
            return message
    try:
        first, last = (float(each) for each in arguments[:2])
    except ValueError:
        return message
    in_order = first != last if name in SPACED else first < last
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
    """Return a value with DIGITS digits; a whole number in full, so that keys of whole numbers accept it."""
    whole = round(value)
    return str(whole) if abs(value - whole) <= 1e-9 * abs(value) else f"{value:.{DIGITS}g}"
