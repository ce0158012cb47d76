"""The table of a sweep for the console, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console

from components.console import markdown_table, new_table, number_text
from components.launch.sweep.losses import Agreement, compare_losses, share_one_curve
from components.launch.sweep.plan import Sweep
from components.launch.sweep.point_rows import SweepRow, read_points
from components.terminal import printable

DISAGREES = "LOSS DISAGREES"


class Criterion(StrEnum):
    """What makes a point of a sweep the best one."""

    speed = "tokens/s"
    loss = "held-out loss"
    accuracy = "held-out accuracy"

    def score(self, row: SweepRow) -> float | None:
        """Return the value to maximize; None if the point did not measure it."""
        match self:
            case Criterion.speed:
                return row.tokens_per_second
            case Criterion.loss:
                return None if row.eval_loss is None else -row.eval_loss
            case Criterion.accuracy:
                return row.eval_accuracy


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Rows of the table in printing order, and the result of the loss comparison."""

    sweep: Sweep
    rows: list[SweepRow]
    agreement: Agreement
    criterion: Criterion | None
    """What the ok points are compared by; None if nothing makes them comparable."""

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
        """Return how the best point was chosen, unless by its speed."""
        if self.criterion is None:
            return ["best: not chosen, since the points' objectives or data differ and not all report an accuracy"]
        if self.criterion is Criterion.speed or self.best is None:
            return []
        return [f"best: by {self.criterion}, since the points train different curves"]


def read_report(sweep: Sweep) -> SweepReport:
    """Return the report of a sweep: ok points from best to worst, then the others by number."""
    rows = read_points(sweep)
    criterion = _criterion([row for row in rows if row.state == "ok"])

    def order(row: SweepRow) -> tuple[bool, float, float]:
        if row.state != "ok":
            return True, 0.0, 0.0
        score = None if criterion is None else criterion.score(row)
        return False, math.inf if score is None else -score, -(row.tokens_per_second or 0.0)

    rows.sort(key=order)
    return SweepReport(sweep, rows, compare_losses(rows), criterion)


def _criterion(ok: list[SweepRow]) -> Criterion | None:
    """Return what ok points are compared by: points of one curve by speed, others by what they learned.

    Held-out losses are comparable only for the same objective and data, accuracies for the same data.
    """
    if share_one_curve(ok):
        return Criterion.speed
    sections = {name: {_text(row.config.get(name)) for row in ok} for name in ("objective", "data")}
    if len(sections["data"]) > 1:
        return None
    if len(sections["objective"]) == 1 and all(row.eval_loss is not None for row in ok):
        return Criterion.loss
    if all(row.eval_accuracy is not None for row in ok):
        return Criterion.accuracy
    return None


def _text(section: object) -> str:
    return json.dumps(section, sort_keys=True, default=str)


def print_table(report: SweepReport, console: Console) -> None:
    """Print the table and the lines below it."""
    header = _header(report)
    table = new_table(header, [*range(len(report.sweep.keys) + 2), header.index("status")])
    for row in report.rows:
        style = "bold" if row is report.best else "red" if row.point.number in report.agreement.disagreeing else None
        table.add_row(*_cells(report, row), style=style)
    console.print(table)
    for line in report.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def to_markdown(report: SweepReport) -> str:
    """Return the table and the lines below it as Markdown."""
    sweep, rows = report.sweep, [_cells(report, row) for row in report.rows]
    if report.best is not None:
        rows[0] = [f"**{cell}**" if cell else "" for cell in rows[0]]
    lines = markdown_table(_header(report), rows)
    listed = [f"- {line}" for line in report.lines()]
    return printable(
        "\n".join([f"# Sweep {sweep.directory.name}", "", f"`{sweep.command}`", "", *lines, "", *listed, ""])
    )


def to_csv(report: SweepReport) -> str:
    """Return the table as CSV, with unrounded numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["run", *report.sweep.keys, "mesh", "processes", "tokens_per_second", "tokens_per_second_per_process", "mfu",
         "peak_memory_gib", "peak_reserved_gib", "planned_memory_gib", "step_seconds", "planned_step_seconds",
         "last_loss", "eval_loss", "eval_accuracy", "wall_seconds", "status", "best", "losses_agree", "reason"]
    )  # fmt: skip
    for row in report.rows:
        values = [row.point.values.get(key, "") for key in report.sweep.keys]
        numbers = [row.processes, row.tokens_per_second, row.tokens_per_second_per_process, row.result.get("mfu"),
                   row.peak_memory_gib, row.peak_reserved_gib, row.planned_memory_gib, row.result.get("step_seconds"),
                   row.planned_step_seconds, row.last_loss, row.eval_loss, row.eval_accuracy,
                   row.seconds]  # fmt: skip
        agrees = row.point.number not in report.agreement.disagreeing
        writer.writerow(
            [row.point.name, *values, row.mesh, *numbers, row.state, row is report.best, agrees, row.reason]
        )
    return text.getvalue()


def first_line(text: str, longest: int = 300) -> str:
    """Return the first non-blank line of a message, shortened to `longest` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _header(report: SweepReport) -> list[str]:
    has_steps = any(row.result.get("last_loss") is not None for row in report.rows)
    loss = "last loss" if has_steps or not any(row.last_loss is not None for row in report.rows) else "eval loss"
    speed = ["tokens/s", "per process", *(["MFU"] if report.has_mfu else [])]
    memory = ["peak GiB", *(["reserved GiB"] if _has_reserved(report) else [])]
    if _has_plans(report):
        memory += ["planned GiB", "step s", "planned s"]
    return ["run", *report.sweep.keys, "mesh", "processes", *speed, *memory, loss, *_judged(report), "wall s", "status"]


def _judged(report: SweepReport) -> list[str]:
    """Return the header of the column that points are compared by, unless it is there anyway."""
    return [report.criterion] if report.criterion in (Criterion.loss, Criterion.accuracy) else []


def _has_reserved(report: SweepReport) -> bool:
    """Return whether any run was on GPUs, where torch's allocator reserves more memory than it allocates."""
    return any(row.peak_reserved_gib is not None for row in report.rows)


def _has_plans(report: SweepReport) -> bool:
    """Return whether any run has estimates (cluster.gpu), which are then shown beside the measured figures."""
    return any(row.planned_step_seconds is not None for row in report.rows)


def _cells(report: SweepReport, row: SweepRow) -> list[str]:
    mfu = [number_text(row.result.get("mfu"), ".1%")] if report.has_mfu else []
    return [
        row.point.name,
        *(row.point.values.get(key, "") for key in report.sweep.keys),
        row.mesh,
        number_text(row.processes, "d"),
        number_text(row.tokens_per_second, ",.0f"),
        number_text(row.tokens_per_second_per_process, ",.0f"),
        *mfu,
        number_text(row.peak_memory_gib, ".2f"),
        *([number_text(row.peak_reserved_gib, ".2f")] if _has_reserved(report) else []),
        *(
            [
                number_text(row.planned_memory_gib, ".2f"),
                number_text(row.result.get("step_seconds"), ".3g"),
                number_text(row.planned_step_seconds, ".3g"),
            ]
            if _has_plans(report)
            else []
        ),
        number_text(row.last_loss, ".4f"),
        *([number_text(row.eval_loss, ".4f")] if report.criterion is Criterion.loss else []),
        *([number_text(row.eval_accuracy, ".1%")] if report.criterion is Criterion.accuracy else []),
        number_text(row.seconds, ",.1f"),
        report.status(row),
    ]
