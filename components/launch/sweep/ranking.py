"""Ranking of the points of a sweep, points that are stopped early, and the table.

Points are ranked by losses or rewards where they are comparable. The table is printed, or written as Markdown and CSV.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from components.config.compose.sweep_keys import EVAL_LOSS, Goal
from components.config.stored_run import MetricsLog, is_number
from components.launch.sweep.plan import EARLY_STEPS, Point, Sweep, SweepRow, read_points
from components.presentation import markdown_table, new_table, number_text
from components.terminal import fit, printable

_FREE_SECTIONS = ("parallelism", "cluster", "logging", "checkpoint", "generation")
"""Config sections that do not affect the loss curve."""
_FREE_KEYS = {
    "run": ("dir", "name", "resume"),
    "model": ("loss",),
    "training": ("micro_batch_size", "log_every", "eval_every", "gc_every"),
    "evaluation": ("micro_batch_size",),
    "rollouts": ("rows",),
    "peft": ("export",),
}
"""Keys of other sections that do not affect the loss curve."""
_BEFORE, _AFTER = ("first_eval_{}", "first_{}"), ("last_{}", "eval_{}")
"""Keys of result.json for loss or reward: held-out and training at the start, training and held-out at the end."""
_EARLY = " of step "
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Allowed relative difference between losses of one curve, by matmul dtype."""
_LOOSEST = 2e-2
"""Allowed relative difference for 16-bit and unknown dtypes, and for final losses after more than EARLY_STEPS: training
amplifies rounding differences even between correct meshes. The early steps in metrics.jsonl are compared with
_TOLERANCES."""
_FEWEST_ENDED = 4
"""Number of points that must have ended with a value at the same step before another is stopped."""
_TEXT_COLUMNS = ("run", "mesh", "status")
_SPARE = (
    *("reserved GiB", "planned GiB", "planned s", "per process", "wall s", "mesh", "peak GiB", "processes", "MFU"),
    *("step s", "last loss", "last reward"),
)
"""Columns that a narrow console does without, the first ones first; then the swept keys, which name the runs."""


@dataclass(frozen=True, slots=True)
class _Criterion:
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


SPEED = _Criterion("tokens_per_second", Goal.max, "tokens/s")

LOSS = _Criterion(EVAL_LOSS, Goal.min, "held-out loss")

_REWARD = _Criterion("eval_reward", Goal.max, "held-out reward")

_ACCURACY = _Criterion("eval_accuracy", Goal.max, "held-out accuracy")


def choose_criterion(sweep: Sweep, ok: list[SweepRow]) -> _Criterion | None:
    """Choose the ranking metric of successful points; None if they are not comparable.

    A study is judged by sweep.metric. With its default, the points of another sweep are compared by speed if they train
    one curve, else by what they learned. Held-out losses and rewards are comparable only for the same objective and
    data, accuracies for the same data.
    """
    if judged_by_metric(sweep):
        known = next((each for each in (SPEED, LOSS, _REWARD, _ACCURACY) if each.metric == sweep.metric), None)
        return _Criterion(sweep.metric, sweep.goal, known.label if known else sweep.metric)
    if _share_one_curve(ok):
        return SPEED
    sections = {name: {_text(row.config.get(name)) for row in ok} for name in ("objective", "data")}
    if len(sections["data"]) > 1:
        return None
    learned = _REWARD if any(row.eval_reward is not None for row in ok) else LOSS
    values = [row.eval_loss if learned is LOSS else row.eval_reward for row in ok]
    shares_objective = len(sections["objective"]) == 1
    if shares_objective and None not in values:
        return learned
    if all(row.eval_accuracy is not None for row in ok):
        return _ACCURACY
    return learned if shares_objective and any(value is not None for value in values) else None


def judged_by_metric(sweep: Sweep) -> bool:
    """Return whether the points are compared by sweep.metric, whatever they have in common."""
    return sweep.metric != EVAL_LOSS or sweep.study is not None


def missing_metric(sweep: Sweep, criterion: _Criterion | None, ok: list[SweepRow]) -> str:
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
    """Numbers of the points whose losses or rewards differ from the majority of their curve."""
    notes: list[str] = field(default_factory=list)
    """The result as sentences."""


def _compare_losses(rows: list[SweepRow]) -> Agreement:
    """Compare the losses, or rewards, of all successful points, grouped by the curve that they should train."""
    curves: dict[str, list[SweepRow]] = defaultdict(list)
    for row in rows:
        names = [name.format(row.improves) for name in (*_BEFORE, *_AFTER)]
        if row.state == "ok" and row.config and any(row.result.get(name) is not None for name in names):
            curves[json.dumps(_curve_config(row.config), sort_keys=True, default=str)].append(row)
    compared = [curve for curve in curves.values() if len(curve) > 1]
    agreement = Agreement()
    if not compared:
        agreement.notes.append("losses: not compared, since no two ok points should train the same curve")
    for curve in compared:
        _compare(curve, agreement)
    return agreement


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


def _tolerance(row: SweepRow) -> tuple[float, str]:
    """Return the allowed relative difference of a point's losses, and its matmul dtype."""
    dtype = row.result.get("compute_dtype") or "unknown dtype"
    return _TOLERANCES.get(dtype, _LOOSEST), dtype


def _compare(curve: list[SweepRow], found: Agreement) -> None:
    """Compare each point with the one that agrees with most others, since the first one may be the wrong one."""
    reference = max(curve, key=lambda row: sum(not _differences(row, other) for other in curve))
    kind, worst = {"loss": "losses", "reward": "rewards"}[reference.improves], 0.0
    names = f"{len(curve)} points" if len(curve) > 4 else ", ".join(row.point.name for row in curve)
    dtypes = sorted({_tolerance(row)[1] for row in curve} - {"float64"})
    if kind == "rewards" and dtypes and any(_differences(row, reference) for row in curve):
        # No sign of a wrong mesh: once rounding changes one sampled token, the weights and so all later answers differ.
        # In float64 that hardly ever happens.
        found.notes.append(
            f"rewards differ: {names} train one curve, but in {', '.join(dtypes)} rounding may change sampled tokens; "
            "compare meshes with model.dtype=float64"
        )
        return
    for row in curve:
        worst = max([worst, *(_distance(row, reference, name) for name in _compared(row, reference))])
        for name in _differences(row, reference):
            allowed, dtype = _allowed(row, reference, name)
            found.disagreeing.add(row.point.number)
            found.notes.append(
                f"{kind} DISAGREE: {name} of {row.point.name} is {_value(row, name)}, of {reference.point.name} "
                f"{_value(reference, name)}: {_distance(row, reference, name):.1e} apart, more than {allowed:.0e} "
                f"({dtype})"
            )
    if any(row.point.number in found.disagreeing for row in curve):
        found.notes.append("one of these meshes is wrong, unless the model has dropout, which differs between meshes")
    else:
        allowed, dtype = max(_allowed(row, reference, _BEFORE[0]) for row in curve)
        apart = f"at most {worst:.1e} apart" if worst else "bit-equal"
        late = max(_allowed(row, reference, _AFTER[0].format(reference.improves))[0] for row in curve)
        until = "" if late == allowed else f"; {late:.0e} after step {EARLY_STEPS}"
        found.notes.append(f"{kind} agree: {names} train one curve, {apart} (allowed: {allowed:.0e}, {dtype}{until})")


def _compared(row: SweepRow, other: SweepRow) -> list[str]:
    """Return the names of the values to compare between two points, including those of common early steps."""
    steps, kind = sorted(row.early_values.keys() & other.early_values.keys()), row.improves
    ends = [[name.format(kind) for name in names] for names in (_BEFORE, _AFTER)]
    return [*ends[0], *(f"{kind}{_EARLY}{step}" for step in steps), *ends[1]]


def _differences(row: SweepRow, other: SweepRow) -> list[str]:
    return [name for name in _compared(row, other) if not _distance(row, other, name) <= _allowed(row, other, name)[0]]


def _allowed(row: SweepRow, other: SweepRow, name: str) -> tuple[float, str]:
    allowed, dtype = max(_tolerance(row), _tolerance(other))
    steps = max(each.result.get("steps") or 0 for each in (row, other))
    is_late = steps > EARLY_STEPS and name in [each.format(row.improves) for each in _AFTER]
    return (max(allowed, _LOOSEST) if is_late else allowed), dtype


def _value(row: SweepRow, name: str) -> Any:
    _, is_early, step = name.partition(_EARLY)
    return row.early_values[int(step)] if is_early else row.result.get(name)


def _distance(row: SweepRow, other: SweepRow, name: str) -> float:
    """Return the relative difference of a loss or reward; inf if only one of the two is finite."""
    mine, theirs = _value(row, name), _value(other, name)
    numbers = [value is not None and math.isfinite(value) for value in (mine, theirs)]
    if not all(numbers):
        return math.inf if any(numbers) else 0.0
    return abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-12)


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


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Rows of the table in printing order, and the result of comparing losses or rewards."""

    sweep: Sweep
    rows: list[SweepRow]
    agreement: Agreement
    criterion: _Criterion | None
    """What the ok points are compared by; None if nothing makes them comparable."""
    problem: str = ""
    """Why the points cannot be compared by sweep.metric; empty: they can."""

    @property
    def best(self) -> SweepRow | None:
        """The best point with state ok; None if none measured what the points are compared by."""
        first = self.rows[0] if self.rows else None
        if first is None or first.state != "ok" or self.criterion is None:
            return None
        return first if self.criterion.score(first) is not None else None

    @property
    def has_mfu(self) -> bool:
        """Whether any run recorded its MFU."""
        return any(row.result.get("mfu") is not None for row in self.rows)

    def status(self, row: SweepRow) -> str:
        """Return the text of the column `status`."""
        if row.point.number in self.agreement.disagreeing:
            return f"{row.state}, {row.improves.upper()} DISAGREES"
        return f"{row.state}, best" if row is self.best else row.state

    def lines(self) -> list[str]:
        """Return the lines below the table: the reason of each point that has one, and the comparison of losses."""
        reasons = [f"{row.point.name}: {row.state}: {first_line(row.reason)}" for row in self.rows if row.reason]
        return reasons + self.agreement.notes + self._judgement()

    def _judgement(self) -> list[str]:
        """Return how the best point was chosen, unless by its speed, and the ok points that could not be compared."""
        if self.problem:
            return [f"best: not chosen: {self.problem}"]
        if self.criterion is None:
            return ["best: not chosen, since the points' objectives or data differ and not all report an accuracy"]
        is_default = not judged_by_metric(self.sweep)
        if self.criterion == SPEED and is_default:
            return []
        missing = [row.point.name for row in self.rows if row.state == "ok" and self.criterion.score(row) is None]
        lines = [f"{name}: has no {self.criterion.label}, so it cannot be the best" for name in missing]
        reason = (
            "since the points train different curves" if is_default else f"the {self.criterion.goal}imum (sweep.metric)"
        )
        return lines if self.best is None else [*lines, f"best: by {self.criterion.label}, {reason}"]


def read_report(sweep: Sweep) -> SweepReport:
    """Return the report of a sweep: ok points from best to worst, last those whose losses disagree; then the others by
    number."""
    rows = read_points(sweep)
    ok = [row for row in rows if row.state == "ok"]
    criterion = choose_criterion(sweep, ok)

    def order(row: SweepRow) -> tuple[bool, float, float]:
        if row.state != "ok":
            return True, 0.0, 0.0
        score = None if criterion is None else criterion.score(row)
        return False, math.inf if score is None else -score, -(row.tokens_per_second or 0.0)

    rows.sort(key=order)
    agreement = _compare_losses(rows)
    rows.sort(key=lambda row: (row.state != "ok", row.point.number in agreement.disagreeing))
    return SweepReport(sweep, rows, agreement, criterion, missing_metric(sweep, criterion, ok))


def print_table(report: SweepReport, console: Console) -> None:
    """Print the table and the lines below it, without the _SPARE columns for which the console is too narrow."""
    columns = {name: [cell(row) for row in report.rows] for name, cell in _columns(report).items()}
    widths = {name: max(map(cell_len, [*name.split(), *cells])) for name, cells in columns.items()}
    left_out = []
    for name in (each for each in (*_SPARE, *report.sweep.keys) if each in widths):
        if sum(widths.values()) + 2 * len(widths) <= console.width:
            break
        left_out.append(name)
        del widths[name]
    texts = [*_TEXT_COLUMNS, *report.sweep.keys]
    table = new_table(list(widths), [number for number, name in enumerate(widths) if name in texts])
    for column, width in zip(table.columns, widths.values(), strict=True):
        column.min_width = width
    for number, row in enumerate(report.rows):
        style = "bold" if row is report.best else "red" if row.point.number in report.agreement.disagreeing else None
        table.add_row(*(columns[name][number] for name in widths), style=style)
    console.print(table)
    lines = report.lines()
    if left_out:
        lines.append(f"only in report.md, since the terminal has {console.width} columns: {', '.join(left_out)}")
    for line in lines:
        text = fit(line, console.width) if console.is_terminal else line
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def to_markdown(report: SweepReport) -> str:
    """Return the table and the lines below it as Markdown."""
    sweep, columns = report.sweep, _columns(report)
    rows = [[cell(row) for cell in columns.values()] for row in report.rows]
    if report.best is not None:
        rows[0] = [f"**{cell}**" if cell else "" for cell in rows[0]]
    lines = markdown_table(list(columns), rows)
    listed = [f"- {line}" for line in report.lines()]
    return printable(
        "\n".join([f"# Sweep {sweep.directory.name}", "", f"`{sweep.command}`", "", *lines, "", *listed, ""])
    )


def to_csv(report: SweepReport) -> str:
    """Return the table as CSV, with unrounded numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["run", *report.sweep.keys, "mesh", "processes", "tokens_per_second", "tokens_per_second_per_process",
              "mfu", "peak_memory_gib", "peak_reserved_gib", "planned_memory_gib", "step_seconds",
              "planned_step_seconds", "last_loss", "eval_loss", "last_reward", "eval_reward", "eval_accuracy",
              "wall_seconds", "status", "best", "losses_agree", "reason"]  # fmt: skip
    judged = report.criterion.metric if report.criterion and report.criterion.metric not in header else None
    writer.writerow(header if judged is None else [*header, judged])
    for row in report.rows:
        values = [row.point.values.get(key, "") for key in report.sweep.keys]
        numbers = [row.processes, row.tokens_per_second, row.tokens_per_second_per_process, row.result.get("mfu"),
                   row.peak_memory_gib, row.peak_reserved_gib, row.planned_memory_gib, row.result.get("step_seconds"),
                   row.planned_step_seconds, row.last_loss, row.eval_loss, row.number("last_reward"),
                   row.number("eval_reward"), row.eval_accuracy, row.seconds]  # fmt: skip
        agrees = row.point.number not in report.agreement.disagreeing
        cells = [row.point.name, *values, row.mesh, *numbers, row.state, row is report.best, agrees, row.reason]
        writer.writerow(cells if judged is None else [*cells, row.number(judged)])
    return text.getvalue()


def first_line(text: str, longest: int = 300) -> str:
    """Return the first non-blank line of a message, shortened to `longest` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else f"{line[: longest - 3].rpartition(' ')[0] or line[: longest - 3]}..."


def _columns(report: SweepReport) -> dict[str, Callable[[SweepRow], str]]:
    """Return the columns of the table: header -> function that returns a row's text."""
    rows = report.rows

    def numbers(name: str, form: str) -> Callable[[SweepRow], str]:
        return lambda row: number_text(getattr(row, name), form)

    def results(key: str, form: str) -> Callable[[SweepRow], str]:
        return lambda row: number_text(row.result.get(key), form)

    def swept(key: str) -> Callable[[SweepRow], str]:
        return lambda row: row.point.values.get(key, "")

    columns: dict[str, Callable[[SweepRow], str]] = {
        "run": lambda row: row.point.name,
        **{key: swept(key) for key in report.sweep.keys},
        "mesh": lambda row: row.mesh,
        "processes": numbers("processes", "d"),
        "tokens/s": numbers("tokens_per_second", ",.0f"),
        "per process": numbers("tokens_per_second_per_process", ",.0f"),
    }
    if report.has_mfu:
        columns["MFU"] = results("mfu", ".1%")
    columns["peak GiB"] = numbers("peak_memory_gib", ".2f")
    if any(row.peak_reserved_gib is not None for row in rows):  # on GPUs torch reserves more than it allocates
        columns["reserved GiB"] = numbers("peak_reserved_gib", ".2f")
    if any(row.planned_step_seconds is not None for row in rows):  # with cluster.gpu
        columns["planned GiB"] = numbers("planned_memory_gib", ".2f")
        columns["step s"] = results("step_seconds", ".3g")
        columns["planned s"] = numbers("planned_step_seconds", ".3g")
    return columns | _learned(report) | {"wall s": numbers("seconds", ",.1f"), "status": report.status}


def _learned(report: SweepReport) -> dict[str, Callable[[SweepRow], str]]:
    """Return the columns of losses, which mean nothing in runs with rewards, of rewards, and of the criterion."""
    rows, criterion = report.rows, report.criterion
    is_rewarded = any(row.improves == "reward" for row in rows)
    has_loss = any(row.last_loss is not None for row in rows)
    only_evaluates = has_loss and all(row.result.get("last_loss") is None for row in rows)
    columns: dict[str, Callable[[SweepRow], str]] = {}
    if has_loss or not is_rewarded:
        columns["eval loss" if only_evaluates else "last loss"] = lambda row: number_text(row.last_loss, ".4f")
    if not only_evaluates and any(row.eval_loss is not None for row in rows):
        columns[LOSS.label] = lambda row: number_text(row.eval_loss, ".4f")
    others = {"last_reward": ("last reward", ".4f"), _REWARD.metric: (_REWARD.label, ".4f")} if is_rewarded else {}
    others = {name: shown for name, shown in others.items() if any(row.number(name) is not None for row in rows)}
    if criterion == _ACCURACY:
        others[_ACCURACY.metric] = _ACCURACY.label, ".1%"
    elif criterion is not None and criterion.metric not in (SPEED.metric, LOSS.metric, *others):
        others[criterion.metric] = criterion.metric, ".4g"

    def number(name: str, form: str) -> Callable[[SweepRow], str]:
        return lambda row: number_text(row.number(name), form)

    return columns | {label: number(name, form) for name, (label, form) in others.items()}
