"""Report of compare.py: ratios, the comparison of loss curves, and the table for console, Markdown, CSV and PNG."""

from __future__ import annotations

import csv
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from components.launch.sweep.ranking import first_line
from components.presentation import (
    MISSING,
    draw_curves,
    figure_text,
    finish_axes,
    has_matplotlib,
    new_figure,
    save_figure,
)
from scripts.benchmark.peers.workload import Workload

OURS = "meshbook"
GATED_STEPS = 50
"""Number of first steps whose losses are compared with the reference; later losses must only be finite."""
FLOAT32_BOUND = 1e-5
"""Bound of the relative difference of these losses in float32, a few tens of times larger than rounding errors."""
COLUMNS = (
    "arm",
    "target tokens/s",
    "spread",
    "Meshbook / arm",
    "of matmul peak",
    "peak GiB",
    "worst loss difference",
    "verdict",
)
WIDTH = 160
"""Width of the table if the output is not a terminal."""


@dataclass(frozen=True)
class Turn:
    """Measurements of one run of an arm over its measured steps; the losses are those of all steps."""

    losses: list[float]
    seconds: float
    processor_seconds: float
    memory: dict[str, float]
    """Peak memory in GiB: allocated and reserved on CUDA, resident on a CPU."""
    settings: dict[str, Any]
    """Effective optimizer settings."""
    versions: dict[str, str]
    cost: float
    """Seconds used for throughput: wall time on CUDA, processor time on a CPU."""
    targets: int
    """Number of target tokens."""
    flops: float
    """Model FLOPs, without padding and recomputation."""


@dataclass
class Arm:
    """A framework's runs of the workload."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    reason: str = ""
    """Why it was not measured; empty if it was."""

    def add(self, turn: Turn | str) -> None:
        """Add a run, or the reason of its failure; an arm that failed once is not measured."""
        if isinstance(turn, str):
            self.reason = first_line(turn)
        else:
            self.turns.append(turn)

    @property
    def speed(self) -> float:
        """Target tokens per second, the median of its runs."""
        return statistics.median(turn.targets / turn.cost for turn in self.turns)

    @property
    def spread(self) -> float:
        """Difference between the fastest and the slowest run, relative to the median: the size of the noise."""
        speeds = [turn.targets / turn.cost for turn in self.turns]
        return (max(speeds) - min(speeds)) / self.speed

    @property
    def tflops(self) -> float:
        """Model TFLOP/s, the median of its runs."""
        return statistics.median(turn.flops / turn.cost for turn in self.turns) / 1e12

    @property
    def memory(self) -> dict[str, float]:
        """Peak memory by kind, the maximum over its runs."""
        return {name: max(turn.memory[name] for turn in self.turns) for name in self.turns[0].memory}


def ratio(mine: list[Turn], theirs: list[Turn]) -> float:
    """Return the throughput of `mine` relative to `theirs`: the median over pairs of runs of the same round."""
    pairs = zip(mine, theirs, strict=False)
    return statistics.median(their.cost / their.targets * my.targets / my.cost for my, their in pairs)


def worst_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves; infinite if lengths differ or a value is not finite."""
    if len(losses) != len(reference):
        return math.inf
    differences = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, reference, strict=True)]
    return max((difference if math.isfinite(difference) else math.inf for difference in differences), default=math.inf)


def gated_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves over their first GATED_STEPS.

    It is infinite if lengths differ or any loss of `losses` is not finite. Later steps are left out because training
    amplifies rounding: float32 curves that differ by 2e-6 at step 100 can differ by 1e-3 at step 200.
    """
    if len(losses) != len(reference) or not all(map(math.isfinite, losses)):
        return math.inf
    return worst_difference(losses[:GATED_STEPS], reference[:GATED_STEPS])


def why_void(turns: list[Turn], reference: Turn, bound: float, dtype: str | None = None) -> str:
    """Return how an arm's training differs from the reference's; empty if it does not.

    Args:
        dtype: Required dtype of the trained parameters; None: any.
    """
    expected = {**reference.settings, "dtypes": [dtype]}
    for turn in turns:
        for name, value in expected.items():
            if turn.settings.get(name) != value and (name != "dtypes" or dtype is not None):
                return f"{name} {turn.settings.get(name)}, not {value}"
    worst = max(gated_difference(turn.losses, reference.losses) for turn in turns)
    return "" if worst <= bound else f"losses differ by {worst:.1e}, more than {bound:.0e}"


@dataclass
class Report:
    """Results of all arms of a task."""

    command: str
    workload: Workload
    reference: Turn
    """First run of the bare loop."""
    bound: float
    arms: list[Arm]
    roofs: list[float]
    """TFLOP/s of a large matmul in each round."""
    notes: list[str]

    def finish(self, out: Path) -> int:
        """Print and write the report; return 0 if no arm is void and Meshbook, if it is an arm, was measured."""
        out.mkdir(parents=True, exist_ok=True)
        ranked = self.ranked()
        rows = [self.cells(arm) for arm in ranked]
        table = Table(title=self.title())
        for column in COLUMNS:
            table.add_column(column, overflow="fold")
        for arm, row in zip(ranked, rows, strict=True):
            table.add_row(*row, style="red" if self.void(arm) else "dim" if arm.reason else "")
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        console.print(table)
        for line in self.lines():
            console.print(line, markup=False)
        (out / "compare.md").write_text(self.markdown(rows))
        self._write_csv(out / "compare.csv", ranked)
        if problem := self._plot(out / "compare.png", ranked):
            print(problem)
        print(f"report: {out / 'compare.md'}")
        return int(any(self.void(arm) or (arm.reason and arm.name == OURS) for arm in self.arms))

    def void(self, arm: Arm) -> str:
        """Return why an arm is void; empty if it is valid or was not measured."""
        if arm.reason:
            return ""
        stored = str(self.workload.stored).removeprefix("torch.")
        # Adapters have the dtype that each library chooses: float32, or that of the model.
        return why_void(arm.turns, self.reference, self.bound, None if self.workload.lora_rank else stored)

    def ranked(self) -> list[Arm]:
        """Return the valid arms from fastest to slowest, then the void ones, then those not measured."""
        return sorted(
            self.arms, key=lambda arm: (bool(arm.reason), bool(self.void(arm)), -arm.speed if arm.turns else 0)
        )

    def cells(self, arm: Arm) -> list[str]:
        """Return an arm's row of the table; a void arm has no ratio."""
        if arm.reason:
            return [arm.name, *[""] * (len(COLUMNS) - 2), f"not measured: {arm.reason}"]
        void, ours = self.void(arm), next((each for each in self.arms if each.name == OURS), None)
        comparable = ours is not None and not void and not ours.reason and not self.void(ours)
        worst = max(gated_difference(turn.losses, self.reference.losses) for turn in arm.turns)
        return [
            arm.name,
            f"{arm.speed:,.0f}",
            f"{arm.spread:.0%}",
            f"{ratio(ours.turns, arm.turns):.2f}" if comparable and ours is not None else "",
            f"{arm.tflops / statistics.median(self.roofs):.0%}" if self.roofs and not void else "",
            " / ".join(f"{value:.2f}" for value in arm.memory.values()),
            f"{worst:.1e}",
            f"VOID: {void}" if void else "ok",
        ]

    def title(self) -> str:
        """Return the title, a description of the workload."""
        load = self.workload
        shape = f"hidden {load.shape.hidden}, {load.shape.layers} layers, vocabulary {load.shape.vocabulary:,}"
        trained = f"LoRA of rank {load.lora_rank}" if load.lora_rank else "all parameters"
        return f"{shape}; {trained}, {load.precision}; {load.rows} rows of {load.seq_len} tokens on {load.device}"

    def lines(self) -> list[str]:
        """Return the lines below the table."""
        load = self.workload
        seconds = "wall seconds" if load.device == "cuda" else f"processor seconds, {load.threads} thread(s)"
        kinds = {name for arm in self.arms if arm.turns for name in arm.memory}
        dtype = "bfloat16" if load.device == "cuda" else "float32"
        peak = f"{statistics.median(self.roofs):.4g} TFLOP/s ({dtype})" if self.roofs else "not measured"
        rounds = max((len(arm.turns) for arm in self.arms), default=0)
        versions = {name: version for arm in self.arms for turn in arm.turns for name, version in turn.versions.items()}
        return [
            f"{seconds}; medians of {rounds} rounds of {load.steps} steps after {load.warmup}; matmul peak {peak}",
            f"void if losses differ by more than {self.bound:.0e} from a bare loop's in the first {GATED_STEPS} steps; "
            f"peak GiB: {' / '.join(sorted(kinds))}",
            *self._adapters(),
            ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
            *self.notes,
        ]

    def _adapters(self) -> list[str]:
        if not self.workload.lora_rank:
            return []
        kinds = {arm.name: ", ".join(arm.turns[0].settings["dtypes"]) for arm in self.arms if arm.turns}
        return [f"dtypes of adapters: {'; '.join(f'{name} {kind}' for name, kind in kinds.items())}"]

    def markdown(self, rows: list[list[str]]) -> str:
        """Return the report in Markdown."""
        table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
        notes = [f"- {line}" for line in self.lines()]
        return "\n".join([f"# {self.title()}", "", f"`{self.command}`", "", *lines, "", *notes, ""])

    def _write_csv(self, file: Path, ranked: list[Arm]) -> None:
        """Write all measurements of every run."""
        with file.open("w", newline="") as opened:
            writer = csv.writer(opened, lineterminator="\n")
            names = ["seconds", "processor_seconds", "cost", "targets", "flops"]
            writer.writerow(["arm", "round", *names, "memory_gib", "settings", "versions", "losses", "verdict"])
            for arm in ranked:
                verdict = arm.reason or self.void(arm) or "ok"
                if not arm.turns:
                    writer.writerow([arm.name, *[""] * 10, verdict])
                for number, turn in enumerate(arm.turns, 1):
                    details = [turn.memory, turn.settings, turn.versions, turn.losses]
                    writer.writerow([arm.name, number, *(getattr(turn, name) for name in names), *details, verdict])

    def _plot(self, file: Path, ranked: list[Arm]) -> str | None:
        if not has_matplotlib():
            return f"no plot: {MISSING}"
        measured = [arm for arm in ranked if not arm.reason]
        valid = [arm for arm in measured if not self.void(arm)]
        figure = new_figure(12, 2.5 + 0.3 * max(len(measured), 5))
        bars, curves = figure.subplots(1, 2)
        bars.bar_label(bars.barh(range(len(valid)), [arm.speed for arm in valid]), fmt="{:,.0f}", padding=3)
        bars.set_ylim(max(len(valid), 4) - 0.5, -0.5)
        bars.margins(x=0.3)
        finish_axes(bars, xlabel="target tokens per second", ylabel="", legend=False)
        bars.set_yticks(range(len(valid)), [figure_text(arm.name, 30) for arm in valid])
        bars.set_title("without void arms")
        named = {f"{arm.name}{', VOID' * bool(self.void(arm))}": arm.turns[0].losses for arm in measured}
        losses = {"bare loop, reference": self.reference.losses, **named}
        draw_curves(curves, {name: list(enumerate(values, 1)) for name, values in losses.items()})
        finish_axes(curves)
        figure.suptitle(figure_text(self.title(), 120), fontsize="small")
        save_figure(figure, file)
        return None
