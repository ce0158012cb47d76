"""Expansion of a command line with -m into the points of a sweep, by Hydra's sweeper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # Hydra has no public function that expands a sweep
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from components.config.compose.command_line import Rewritten, read_arguments, read_request
from components.config.compose.composition import Check, compose, no_check
from components.config.compose.explain import override_parts, unknown_key, unreadable
from components.config.compose.overrides import accepted_options
from components.config.compose.short_forms import long_forms, override_with_texts, with_home
from components.config.compose.sources import Request
from components.config.compose.sweep_keys import (
    ListedValues,
    Range,
    SweepConfig,
    combinations,
    draw_points,
    list_values,
    number_as_value,
    read_sweep_keys,
)
from components.config.compose.typed import free_keys, known_keys, whole_number_keys
from components.config.schema.recipes import RecipeConfig
from components.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PointRequest:
    """Overrides of one point of a sweep."""

    overrides: tuple[str, ...]
    """Command line of this point alone, without run.dir, which the sweep sets."""
    values: dict[str, str]
    """Swept key -> its value at this point."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A swept key of a study, and the values from which the study chooses."""

    key: str
    typed_key: str
    """As on the command line, with a prefix such as + if it has one."""
    choices: tuple[str, ...]
    """The listed values; the ends of a range."""
    range: Range | None

    def text(self, value: object) -> str:
        """Return a value as it is written in an override."""
        return number_as_value(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """Sweep requested with -m."""

    request: Request
    run_dir: str | None
    """Override of run.dir, the folder of the whole sweep, if any."""
    keys: SweepConfig
    """Keys of the sweep itself."""
    points: list[PointRequest]
    """Points to run; of a study, points that have every listed value and both ends of each range, for checks."""
    space: tuple[Dimension, ...]
    """The swept keys of a study (sweep.trials); empty for other sweeps."""
    typed: tuple[tuple[str, str], ...]
    """Key and text of each override on the command line."""
    options: tuple[str, ...]
    """Options that also apply to each point, such as --config-dir."""
    shown: tuple[str, ...]
    """--cfg, --package and --resolve, which print configs; empty if the points are to run."""

    def study_point(self, values: Mapping[str, str]) -> PointRequest:
        """Return the point of a study with these values of its keys."""
        return _point(self.typed, [f"{each.typed_key}={values[each.key]}" for each in self.space])


def expand_sweep(
    name: str, schema: type[RecipeConfig], recipe_dir: Path, given: Sequence[str], check: Check = no_check
) -> SweepRequest:
    """Return the points of the sweep on the command line `given`, without composing them.

    The points are the product of all choices (a,b), range(...), log(...) and glob(...), in the order of the command
    line; with sweep.draws they are random, and only their drawn values are in the result; with sweep.trials they are
    chosen later. Raises ConfigError with all problems of the syntax and, if there are any, also those of the first
    point.
    """
    arguments, problems = read_arguments(schema, given)
    keys, key_problems = read_sweep_keys(arguments.sweep)
    overrides = [with_home(override) for override in arguments.overrides]
    listed = list_values(overrides, keys, whole_number_keys(schema), only_ends=bool(key_problems))
    texts = [override_with_texts(override, schema) if "," in override else override for override in listed.overrides]
    problems += key_problems + listed.problems
    try:
        request = read_request(arguments, name, schema, recipe_dir, Rewritten(texts))
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    groups, overrides = request.groups, list(request.overrides)
    accepted = accepted_options(request, groups)
    parsed, unparsed = _parse(overrides, accepted)
    swept = [override for override in parsed if override.is_sweep_override()]
    known = [*known_keys(schema), *groups]
    unknown = [given for given in swept if given.key_or_group not in known and not _is_free(given, schema)]
    rejected = {given.input_line or "": unknown_key(given.key_or_group, given.get_value_string(), known)
               for given in unknown}  # fmt: skip
    for override, problem in _sweep_problems(parsed, [given for given in swept if given not in unknown], accepted):
        rejected.setdefault(override, problem)
    problems += [*unparsed.values(), *rejected.values()]
    columns = _columns([given for given in swept if given.input_line not in rejected])
    problems += _count_problems(keys, columns, listed)
    if problems:
        # The first point is composed all the same: one message then has the problems of its values, too.
        readable = [given for given in parsed if given.input_line not in rejected]
        first = long_forms([_first_value(given) for given in readable], schema, request.folders)
        composed = compose(
            replace(request, overrides=tuple(first)), lambda cfg, others: check(cfg, [*others, *problems])
        )
        raise ConfigError(problems + composed.problems)
    space: tuple[Dimension, ...] = ()
    if keys.draws and columns:
        products = draw_points(columns, listed.drawn, keys, keys.draws)
    elif keys.trials and columns:
        space = tuple(_dimension(each, listed.ranges.get(override)) for override, each in columns.items())
        products = [[column[number % len(column)] for column in columns.values()]
                    for number in range(max(map(len, columns.values())))]  # fmt: skip
    else:
        products = BasicSweeper.split_arguments(swept, None)[0]
    typed = [(_target_of(each), each) for each in overrides]
    return SweepRequest(
        request=request,
        run_dir=next((each for key, each in reversed(typed) if key == "run.dir"), None),
        keys=keys,
        points=[_point(typed, product) for product in products],
        space=space,
        typed=tuple(typed),
        options=_as_arguments(
            {
                "--config-path": arguments.config_path,
                "--config-name": arguments.config_name,
                "--config-dir": arguments.config_dir,
            }
        ),
        shown=_as_arguments({"--cfg": arguments.cfg, "--package": arguments.package})
        + (("--resolve",) if arguments.resolve else ()),
    )


def compose_point(sweep: SweepRequest, point: PointRequest, check: Check) -> tuple[RecipeConfig | None, list[str]]:
    """Return the config of a point, or None if it is invalid, and its problems.

    Args:
        sweep: The sweep.
        point: One of its points.
        check: Returns the problems that involve several sections.

    Raises ConfigError for problems that concern the whole sweep: an unknown key or option, a value of a wrong type.
    """
    common = [sweep.run_dir] if sweep.run_dir else []
    overrides = long_forms([*point.overrides, *common], sweep.request.schema, sweep.request.folders)
    composed = compose(replace(sweep.request, overrides=tuple(overrides)), check)
    if composed.malformed:
        raise ConfigError(composed.problems)
    return composed.cfg, composed.problems


def _first_value(override: Override) -> str:
    """Return an override with its value at the first point."""
    if not override.is_sweep_override():
        return override.input_line or ""
    return BasicSweeper.split_arguments([override], None)[0][0][0]


def override_of(key: str, text: str) -> str:
    """Return the override that sets a key to exactly this text."""
    return f"{key}={QuotedString(text=text, quote=Quote.single).with_quotes()}"


def _parse(overrides: list[str], groups: dict[str, list[str]]) -> tuple[list[Override], dict[str, str]]:
    """Return the overrides that Hydra can parse, and the problems of the others by override."""
    parser, parsed, problems = OverridesParser.create(cast(ConfigLoader, _Options(groups))), [], {}
    for override in overrides:
        try:
            parsed += parser.parse_overrides([override])
        except (HydraException, ValueError):
            problems[override] = unreadable(override)
    return parsed, problems


def _sweep_problems(
    parsed: list[Override], swept: list[Override], groups: dict[str, list[str]]
) -> Iterator[tuple[str, str]]:
    """Yield each swept override that cannot be expanded, with its problem."""
    targets = [_target_of(override.input_line or "") for override in parsed]
    for override in swept:
        key, typed = override.key_or_group, override.input_line or ""
        if key == "run.dir":
            yield typed, f"{typed}: is the folder of the whole sweep, which holds a folder per point; set one folder"
        if (count := targets.count(_target_of(typed))) > 1:
            yield typed, f"{typed}: {_target_of(typed)} is set {count} times; set it once"
        if isinstance(override.value(), RangeSweep) and not override.value().step:  # type: ignore[union-attr]
            yield typed, f"{typed}: a range with a step of 0 never ends; write range(START,STOP,STEP)"
        elif not override.is_discrete_sweep():
            yield (
                typed,
                f"{typed}: an interval has no values to list; write a,b or range(START,STOP,STEP), or draw values with "
                "uniform(LOW,HIGH) and sweep.draws=N",
            )
        elif not any(True for _ in override.sweep_string_iterator()):
            options = (
                f" (there are: {', '.join(groups[key])})" if key in groups else ": only config groups have options"
            )
            yield typed, f"{typed}: matches no option{options}"


def _point(typed: Sequence[tuple[str, str]], product: list[str]) -> PointRequest:
    """Replace each swept override by its value at one point; the others stay as typed."""
    chosen = {_target_of(override): override for override in product}
    return PointRequest(
        overrides=tuple(chosen.get(key, given) for key, given in typed if key != "run.dir"),
        values={key: override_parts(override)[2] for key, override in chosen.items()},
    )


def _target_of(override: str) -> str:
    """Return the key of an override, or its group with the package, since a mixture uses one group in several
    packages."""
    return override.partition("=")[0].lstrip("+~").strip()


def _columns(swept: list[Override]) -> dict[str, list[str]]:
    """Return each swept override -> its overrides with single values."""
    return {given.input_line or "": [each[0] for each in BasicSweeper.split_arguments([given], None)[0]]
            for given in swept}  # fmt: skip


def _dimension(column: Sequence[str], span: Range | None) -> Dimension:
    """Return the dimension of a study with these overrides, which hold single values."""
    typed_key = column[0].partition("=")[0]
    choices = tuple(each.partition("=")[2] for each in column)
    return Dimension(_target_of(column[0]), typed_key, choices, span)


def _count_problems(keys: SweepConfig, columns: Mapping[str, Sequence[str]], listed: ListedValues) -> list[str]:
    """Return the problem of more points than the listed values have combinations."""
    count, name = (keys.draws, "sweep.draws") if keys.draws else (keys.trials, "sweep.trials")
    if not count or not columns or listed.drawn or listed.ranges or combinations(columns) >= count:
        return []
    return [
        f"{name}={count}: the swept keys have only {combinations(columns)} combinations; remove it to "
        "run them all, or draw values with loguniform(LOW,HIGH) or uniform(LOW,HIGH)"
    ]


def _as_arguments(options: dict[str, str | None]) -> tuple[str, ...]:
    return tuple(part for option, value in options.items() if value is not None for part in (option, value))


def _is_free(override: Override, schema: type[RecipeConfig]) -> bool:
    return override.key_or_group.startswith(tuple(f"{key}." for key in free_keys(schema)))


class _Options:
    """Replacement for Hydra's config loader in glob(...), which would not search the folders that are added later."""

    def __init__(self, groups: dict[str, list[str]]) -> None:
        self._groups = groups

    def get_group_options(self, group: str, **_: Any) -> list[str]:
        return self._groups.get(group, [])
