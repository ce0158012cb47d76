"""The table of a sweep for the console, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console

from components.console import markdown_table, new_table, number_text
from components.launch.sweep.plan import Sweep
from components.launch.sweep.point_rows import SweepRow, read_points
from components.launch.sweep.ranking import (
    ACCURACY,
    LOSS,
    SPEED,
    Agreement,
    Criterion,
    choose_criterion,
    compare_losses,
    judged_by_metric,
    missing_metric,
)
from components.terminal import fit, printable

DISAGREES = "LOSS DISAGREES"
_TEXT_COLUMNS = ("run", "mesh", "status")
_SPARE = (
    *("reserved GiB", "planned GiB", "planned s", "per process", "wall s", "mesh", "peak GiB", "processes", "MFU"),
    *("step s", "last loss"),
)
"""Columns that a narrow console does without, the first ones first; then the swept keys, which name the runs."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Rows of the table in printing order, and the result of the loss comparison."""

    sweep: Sweep
    rows: list[SweepRow]
    agreement: Agreement
    criterion: Criterion | None
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
            return f"{row.state}, {DISAGREES}"
        return f"{row.state}, best" if row is self.best else row.state

    def lines(self) -> list[str]:
        """Return the lines below the table: the reason of each point that has one, and the loss comparison."""
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
        why = (
            "since the points train different curves" if is_default else f"the {self.criterion.goal}imum (sweep.metric)"
        )
        return lines if self.best is None else [*lines, f"best: by {self.criterion.label}, {why}"]


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
    agreement = compare_losses(rows)
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
              "planned_step_seconds", "last_loss", "eval_loss", "eval_accuracy", "wall_seconds", "status", "best",
              "losses_agree", "reason"]  # fmt: skip
    judged = report.criterion.metric if report.criterion and report.criterion.metric not in header else None
    writer.writerow(header if judged is None else [*header, judged])
    for row in report.rows:
        values = [row.point.values.get(key, "") for key in report.sweep.keys]
        numbers = [row.processes, row.tokens_per_second, row.tokens_per_second_per_process, row.result.get("mfu"),
                   row.peak_memory_gib, row.peak_reserved_gib, row.planned_memory_gib, row.result.get("step_seconds"),
                   row.planned_step_seconds, row.last_loss, row.eval_loss, row.eval_accuracy,
                   row.seconds]  # fmt: skip
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
    rows, criterion = report.rows, report.criterion
    has_steps = any(row.result.get("last_loss") is not None for row in rows)
    only_evaluates = not has_steps and any(row.last_loss is not None for row in rows)

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
    columns["eval loss" if only_evaluates else "last loss"] = numbers("last_loss", ".4f")
    if not only_evaluates and any(row.eval_loss is not None for row in rows):
        columns[LOSS.label] = numbers("eval_loss", ".4f")
    if criterion == ACCURACY:
        columns[ACCURACY.label] = numbers("eval_accuracy", ".1%")
    elif criterion is not None and criterion.metric not in (SPEED.metric, LOSS.metric):
        columns[criterion.metric] = lambda row: number_text(row.number(criterion.metric), ".4g")
    return columns | {"wall s": numbers("seconds", ",.1f"), "status": report.status}
