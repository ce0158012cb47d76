"""Compare runs of any recipes, which may still be running or have failed: a table, the keys that differ, and a plot.

python scripts/compare.py outputs/finetune/A outputs/pretrain/B      # also writes outputs/compare/compare.md and .png
python scripts/compare.py outputs/sweeps/finetune/SWEEP/*/           # the points of a sweep
python scripts/compare.py A B --metric grad_norm --metric mfu        # plus these metrics: a column and a plot each
python scripts/compare.py A B --out comparison                       # files in another folder

Reads the files of the run directories and nothing else. Any metric of metrics.jsonl can be compared, including those
that a recipe logs with run.log(step, name=value). Exit status 2 for a folder that is no run directory, or a metric that
no run logged.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.stored_run import StoredRun, flat_config, read_run
from components.launch.run_directory_lease import is_held
from components.presentation import (
    LOSS,
    MISSING,
    STEP,
    PlainConsole,
    draw_curves,
    figure_text,
    finish_axes,
    has_matplotlib,
    markdown_table,
    new_figure,
    new_table,
    number_text,
    save_figure,
)
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError, raise_all
from components.protocol.failures import print_problems
from components.protocol.run_files import CONFIG, RECORD, atomic_write, is_replaceable
from components.terminal import HelpText, exit_with, print_text, printable

if TYPE_CHECKING:
    from rich.table import Table

OWN_KEYS = ("run.dir", "run.name")
"""Keys that differ between all runs."""
WIDTH = 200
"""Line width if the output is not a terminal."""
TABLES, PLOT, TITLE = "compare.md", "compare.png", "# Comparison of runs"
"""Files that the script writes, and the first line of the first."""
TEXT_COLUMNS = ("run", "recipe", "model", "mesh", "status")
TOKENS = "target tokens"
"""Label of the axis of tokens."""


def main(arguments: list[str]) -> int:
    """Compare runs; return the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory, which contains config.yaml")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help="a metric in metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/compare"), metavar="FOLDER", help="folder to write to"
    )
    options = parser.parse_args(arguments)
    try:
        comparison = read_comparison(options.runs, options.metric)
        comparison.print(PlainConsole(highlight=False, width=None if sys.stdout.isatty() else WIDTH))
        _check_output(options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        why_not = comparison.plot(options.out / PLOT)
        atomic_write(options.out / TABLES, comparison.to_markdown(has_plot=why_not is None))
        written = [TABLES, *([PLOT] if why_not is None else [])]
        print_text("", *(f"wrote {options.out / name}" for name in written), sep="\n")
        if why_not is not None:
            print_text(f"no plot: {why_not}")
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except OSError as error:
        print_problems(
            [f"{error.filename or options.out}: {error.strerror or error}; fix that, or choose another --out"]
        )
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _check_output(folder: Path) -> None:
    """Raise ConfigError if files of the report's names exist that this script did not write."""
    for name, report in ((TABLES, folder / TABLES), (PLOT, folder / TABLES)):
        if os.path.lexists(folder / name) and not (report.is_file() and is_replaceable(report, TITLE)):
            raise ConfigError(
                f"--out {folder}: {name} exists and is not of this script; move it away, or choose another --out"
            )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs by their names in tables and plots, and the metrics to show besides the losses and rewards."""

    runs: dict[str, StoredRun]
    metrics: list[str]

    @property
    def improved(self) -> list[str]:
        """What runs with metrics improve: loss, reward or both. The loss of a run with rewards is not shown."""
        return sorted({run.improves for run in self.runs.values() if run.lines}) or ["loss"]

    def header(self) -> list[str]:
        """Return the names of the columns."""
        learned = [f"{which} {name}" for name in self.improved for which in ("last", "best", "eval")]
        return ["run", "recipe", "model", "mesh", "steps", "tokens", *learned, *self.metrics, "tokens/s", "peak GiB",
                "wall s", "status"]  # fmt: skip

    def cells(self, name: str) -> list[str]:
        """Return the row of a run."""
        run = self.runs[name]
        learned = [
            number if run.improves == improved else None
            for improved in self.improved
            for number in (run.last(improved), run.best(improved), run.last(f"eval_{improved}"))
        ]
        return [
            name,
            run.recipe,
            run.model,
            run.mesh,
            number_text(run.steps, ",d"),
            number_text(run.tokens, ",d"),
            *(number_text(number, ".4f") for number in learned),
            *(number_text(run.last(metric), ".4g") for metric in self.metrics),
            number_text(run.speed, ",.0f"),
            number_text(run.peak_memory_gib, ".2f"),
            number_text(run.wall_seconds, ",.1f"),
            status_of(run),
        ]

    def differences(self) -> list[list[str]]:
        """Return a row per config key whose values differ: the key, then its value in each run; "-" if it has none."""
        configs = [dict(flat_config(run.config)) for run in self.runs.values()]
        keys = dict.fromkeys(key for config in configs for key in config if key not in OWN_KEYS)
        values = {key: [config.get(key, "-") for config in configs] for key in keys}
        return [[key, *each] for key, each in values.items() if len(set(each)) > 1]

    def errors(self) -> list[str]:
        """Return a line per run that reports why it ended."""
        found = {name: str(run.result.get("error") or "").strip() for name, run in self.runs.items()}
        return [f"{name}: {error.splitlines()[0]}" for name, error in found.items() if error]

    def print(self, console: PlainConsole) -> None:
        """Print the tables."""
        header, rows = self.header(), [self.cells(name) for name in self.runs]
        table = new_table(header, [number for number, name in enumerate(header) if name in TEXT_COLUMNS])
        needed = console.measure(table_with(table, rows), options=console.options.update(max_width=10 * WIDTH)).maximum
        if needed > console.width:  # a column per run instead
            columns = range(len(rows) + 1)
            table = table_with(
                new_table(["", *self.runs], columns, wrap=True), list(zip(header, *rows, strict=True))[1:]
            )
        console.print(table)
        for line in self.errors():
            console.print(line, soft_wrap=True)
        if different := self.differences():
            console.print()
            columns = range(len(self.runs) + 1)
            console.print(table_with(new_table(["key", *self.runs], columns, wrap=True), different))

    def to_markdown(self, *, has_plot: bool) -> str:
        """Return the tables as Markdown, with the plot between them if there is one."""
        lines = [
            TITLE,
            "",
            *markdown_table(self.header(), [self.cells(name) for name in self.runs]),
            "",
        ]
        lines += [f"- {line}" for line in self.errors()]
        lines += ["", *(["![curves](compare.png)", ""] if has_plot else [])]
        if rows := self.differences():
            lines += ["Keys whose values differ:", "", *markdown_table(["key", *self.runs], rows), ""]
        return printable("\n".join(lines))

    def plot(self, file: Path) -> str | None:
        """Write the curves as PNG; return the reason if it was not written."""
        if not has_matplotlib():
            return MISSING
        panels: list[tuple[str, Callable[[StoredRun], list[tuple[int, float]]], str, str]] = [
            ("loss", lambda run: _learned(run, "loss"), STEP, LOSS),
            ("loss over tokens", loss_over_tokens, TOKENS, LOSS),
            ("held-out loss", lambda run: _learned(run, "loss", "eval_"), STEP, LOSS),
            ("reward", lambda run: _learned(run, "reward"), STEP, "reward"),
            ("held-out reward", lambda run: _learned(run, "reward", "eval_"), STEP, "reward"),
            *((metric, lambda run, metric=metric: run.curve(metric), STEP, metric) for metric in self.metrics),
        ]
        shown = [panel for panel in panels if any(panel[1](run) for run in self.runs.values())]
        if not shown:
            return "no run has logged a loss or a reward"
        rows = -(-len(shown) // 2)
        figure = new_figure(6 * min(len(shown), 2), 4 * rows + 0.2 * len(self.runs))
        for number, (title, curve, xlabel, ylabel) in enumerate(shown, 1):
            axes = figure.add_subplot(rows, min(len(shown), 2), number)
            axes.set(title=figure_text(title, 60))
            curves = {name: curve(run) for name, run in self.runs.items()}
            draw_curves(axes, curves, linear=ylabel == "reward")
            finish_axes(axes, xlabel=xlabel, ylabel=ylabel, legend=False)
        lines = [line for axes in reversed(figure.axes) for line in axes.lines]  # those of the first panel count
        handles = {str(line.get_label()): line for line in lines}
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2)
        save_figure(figure, file)
        return None


def table_with(table: Table, rows: Iterable[Sequence[str]]) -> Table:
    """Add rows to a table and return it."""
    for row in rows:
        table.add_row(*row)
    return table


def read_comparison(folders: list[Path], metrics: list[str]) -> Comparison:
    """Read the runs. Raises ConfigError for folders that are no run directories, and for metrics that no run logged."""
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    raise_all(
        [
            f"{folder}: is not a run directory, it has no {CONFIG}; give the directories of runs, such as "
            "outputs/finetune/RUN"
            for folder in folders
            if not ((folder / CONFIG).is_file() or (folder / RECORD).is_file())
        ]
    )
    runs = [read_run(folder) for folder in folders]
    logged = sorted({metric for run in runs for metric in run.metrics})
    raise_all(
        [
            f"--metric {metric}: no run has logged it; choose from: {', '.join(logged)}"
            for metric in metrics
            if metric not in logged
        ]
    )
    return Comparison(dict(zip(names_of(folders), runs, strict=True)), list(dict.fromkeys(metrics)))


def names_of(folders: list[Path]) -> list[str]:
    """Return the names of the folders, with as many parents as it takes to distinguish those of the same name."""
    names = [folder.name for folder in folders]
    depth = 1
    while repeated := {name for name, count in Counter(names).items() if count > 1}:
        depth += 1
        names = [
            "/".join(folder.parts[-depth:]) if name in repeated else name
            for name, folder in zip(names, folders, strict=True)
        ]
    return names


def _learned(run: StoredRun, name: str, prefix: str = "") -> list[tuple[int, float]]:
    """Return the (step, loss or reward) pairs of a run; none if it improves the other."""
    return run.curve(f"{prefix}{name}") if run.improves == name else []


def loss_over_tokens(run: StoredRun) -> list[tuple[int, float]]:
    """Return the (tokens, loss) pairs of a run, from the lines that have both; none of a run with rewards."""
    if run.improves != "loss":
        return []
    return [(line["tokens"], line["loss"]) for line in run.lines if "tokens" in line and line.get("loss") is not None]


def status_of(run: StoredRun) -> str:
    """Return the status of a run: that of its result, or whether it seems to be running."""
    if status := run.result.get("status"):
        return str(status)
    return "running" if is_held(run.directory) else "no result"


if __name__ == "__main__":
    exit_with(main)
