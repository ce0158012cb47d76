"""The report of scripts/parity.py: printed row by row, and written as Markdown, CSV and PNG."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from components.planning.parity import Bounds, Comparison, MeshResult
from components.presentation import MISSING, PlainConsole, figure_text, has_matplotlib, new_figure, save_figure

COLUMNS = ("mesh", "micro-batches", "loss", "norm", "gradients", "replicas", "seconds", "verdict")
WIDTH = 140
"""Width of the console if the output is not a terminal."""


def _console() -> Console:
    return PlainConsole(width=None if sys.stdout.isatty() else WIDTH)


@dataclass
class Report:
    """Results of the meshes, collected row by row; `finish` writes the report."""

    comparison: Comparison
    command: str
    """Overrides on the command line, shown in the report."""
    console: Console = field(default_factory=_console)
    bounds: Bounds | None = None
    rows: list[MeshResult] = field(default_factory=list)

    def log(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def add(self, result: MeshResult | Bounds) -> None:
        """Add and print the result of a mesh, or set the bounds, which precede all results."""
        if isinstance(result, Bounds):
            self.bounds = result
            return
        self.rows.append(result)
        if not result.rejected:
            self.log("  ".join(self._cells(result)))

    def finish(self) -> int:
        """Print the table and write the files; return 0 if meshes ran and all of them agree, else 1."""
        ran = [row for row in self.rows if not row.rejected]
        table = Table(title=self._title())
        for column in COLUMNS:
            table.add_column(column, overflow="fold")
        for row in ran:
            table.add_row(*self._cells(row), style="" if self._is_good(row) else "red")
        self.console.print(table)
        for line in self.rejected:
            self.log(f"rejected: {line}")
        self._write_markdown(ran)
        self._write_csv()
        if problem := self._plot(ran):
            self.log(problem)
        good = sum(self._is_good(row) for row in ran)
        folder = self.comparison.out
        self.log(f"{good} of {len(ran)} meshes agree with one process, {len(self.rows) - len(ran)} rejected: {folder}")
        return 0 if ran and good == len(ran) else 1

    def _title(self) -> str:
        run = self.comparison
        return f"{run.processes} processes, {run.steps} steps in {run.dtype}: worst relative difference to one process"

    def _is_good(self, row: MeshResult) -> bool:
        return self.bounds is not None and not row.wrong(self.bounds)

    def _cells(self, row: MeshResult) -> list[str]:
        wrong = row.wrong(self.bounds) if self.bounds else []
        if row.failed:
            return [row.mesh, "-", "-", "-", "-", "-", "-", "; ".join(wrong)]
        return [
            row.mesh,
            str(row.accumulation),
            f"{row.loss:.1e}",
            f"{row.norm:.1e}",
            f"{row.gradient:.1e}" if self.comparison.gradients else "-",
            "differ" if row.different_replicas else "bit-equal",
            f"{row.seconds:.1f}",
            "; ".join(wrong) or "ok",
        ]

    @property
    def rejected(self) -> list[str]:
        """One line for each rejected mesh, with the reasons."""
        return [f"{row.mesh}: {'; '.join(row.rejected)}" for row in self.rows if row.rejected]

    def _write_markdown(self, ran: list[MeshResult]) -> None:
        bounds = self.bounds
        lines = [
            f"# {self._title()}",
            "",
            f"`python scripts/parity.py {self.command}`",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
            *(f"| {' | '.join(self._cells(row))} |" for row in ran),
            "",
            f"Bounds: loss {bounds.loss:.1e}, norm {bounds.norm:.1e}, gradients {bounds.gradient:.1e}."
            if bounds
            else "",
            *(["", "Rejected:", "", *(f"- {line}" for line in self.rejected)] if self.rejected else []),
        ]
        (self.comparison.out / "parity.md").write_text("\n".join(lines) + "\n")

    def _write_csv(self) -> None:
        with (self.comparison.out / "parity.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*asdict(MeshResult("")), "verdict"])
            writer.writeheader()
            for row in self.rows:
                values = {
                    key: "; ".join(value) if isinstance(value, list) else value for key, value in asdict(row).items()
                }
                verdict = "rejected" if row.rejected else "ok" if self._is_good(row) else "wrong"
                writer.writerow({**values, "verdict": verdict})

    def _plot(self, ran: list[MeshResult]) -> str | None:
        if not has_matplotlib():
            return f"no plot: {MISSING}"
        shown = [row for row in ran if not row.failed]
        figure = new_figure(9, 2 + 0.3 * max(len(shown), 3))
        axes = figure.add_subplot()
        names = ("loss", "norm", "gradient") if self.comparison.gradients else ("loss", "norm")
        for offset, (name, marker) in enumerate(zip(names, "os^", strict=False)):
            values = [max(getattr(row, name), 1e-18) for row in shown]  # zero cannot be shown on a logarithmic axis
            axes.plot(values, [index + 0.2 * offset for index in range(len(shown))], marker, label=name)
            if self.bounds is not None:
                axes.axvline(getattr(self.bounds, name), color=f"C{offset}", linestyle=":", linewidth=1.5)
        axes.set(xscale="log", xlabel="worst relative difference (dotted: bound)")
        axes.set_title(figure_text(self._title(), 90), fontsize="medium")
        axes.set_yticks(range(len(shown)), [figure_text(row.mesh, 40) for row in shown])
        axes.set_ylim(max(len(shown), 3) - 0.3, -0.5)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
        save_figure(figure, self.comparison.out / "parity.png")
        return None
