"""The arithmetic and the table of compare.py: ratios, the gate over loss curves, console, Markdown, CSV and PNG."""

from __future__ import annotations

import csv
import importlib.util
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from components.launch.sweep.table import first_line
from scripts.benchmark.peers.workload import Workload

OURS = "meshbook"
GATED_STEPS = 50
"""Losses of so many steps decide whether two arms train one curve; later ones have to be finite."""
FLOAT32_BOUND = 1e-5
"""Relative difference that these losses may have in float32: some tens of times what rounding makes of them."""
COLUMNS = (
    "arm",
    "target tokens/s",
    "spread",
    "ours over it",
    "of the roof",
    "peak GiB",
    "worst loss difference",
    "verdict",
)
WIDTH = 160
"""Of a table that is not printed to a terminal."""


@dataclass(frozen=True)
class Turn:
    """What an arm told of one turn: of its counted steps, but for the losses, which are those of all."""

    losses: list[float]
    seconds: float
    processor_seconds: float
    memory: dict[str, float]
    """Peak memory in GiB: allocated and reserved on CUDA, resident on a CPU."""
    settings: dict[str, Any]
    """What its optimizer did."""
    versions: dict[str, str]
    cost: float
    """Seconds that count: by the clock on CUDA, of a processor on a CPU."""
    targets: int
    """Tokens that carry loss."""
    flops: float
    """That the model needs, without padding and recomputation."""


@dataclass
class Arm:
    """One way to train, and what came of it."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    reason: str = ""
    """Why it was not measured."""

    def add(self, turn: Turn | str) -> None:
        """Take a turn, or the reason why there is none; an arm that failed once is not measured."""
        if isinstance(turn, str):
            self.reason = first_line(turn)
        else:
            self.turns.append(turn)

    @property
    def speed(self) -> float:
        """Target tokens per second: the median of its turns."""
        return statistics.median(turn.targets / turn.cost for turn in self.turns)

    @property
    def spread(self) -> float:
        """How far its fastest turn is from its slowest, over the median: what is below that is noise."""
        speeds = [turn.targets / turn.cost for turn in self.turns]
        return (max(speeds) - min(speeds)) / self.speed

    @property
    def tflops(self) -> float:
        """TFLOP/s that the model needs: the median of its turns."""
        return statistics.median(turn.flops / turn.cost for turn in self.turns) / 1e12

    @property
    def memory(self) -> dict[str, float]:
        """The largest peaks of its turns."""
        return {name: max(turn.memory[name] for turn in self.turns) for name in self.turns[0].memory}


def ratio(mine: list[Turn], theirs: list[Turn]) -> float:
    """Return how many times as fast `mine` is as `theirs`: the median over pairs of turns of the same round."""
    pairs = zip(mine, theirs, strict=False)
    return statistics.median(their.cost / their.targets * my.targets / my.cost for my, their in pairs)


def worst_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves; infinite where one is longer, or not a number."""
    if len(losses) != len(reference):
        return math.inf
    apart = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, reference, strict=True)]
    return max((each if math.isfinite(each) else math.inf for each in apart), default=math.inf)


def gated_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two curves over their first GATED_STEPS; infinite as in the above.

    Training amplifies rounding: float32 curves that are 2e-6 apart at step 100 can be 1e-3 apart at step 200.
    """
    if len(losses) != len(reference) or not all(map(math.isfinite, losses)):
        return math.inf
    return worst_difference(losses[:GATED_STEPS], reference[:GATED_STEPS])


def why_void(turns: list[Turn], reference: Turn, bound: float, dtype: str | None = None) -> str:
    """Return why an arm does not train what the reference trains; "": it does.

    Args:
        dtype: In which the trained parameters must be stored; None: no matter.
    """
    wanted = {**reference.settings, "dtypes": [dtype]}
    for turn in turns:
        for name, value in wanted.items():
            if turn.settings.get(name) != value and (name != "dtypes" or dtype is not None):
                return f"{name} {turn.settings.get(name)}, not {value}"
    worst = max(gated_difference(turn.losses, reference.losses) for turn in turns)
    return "" if worst <= bound else f"losses differ by {worst:.1e}, more than {bound:.0e}"


@dataclass
class Report:
    """All arms of a task."""

    command: str
    workload: Workload
    reference: Turn
    """The first turn of the bare loop."""
    bound: float
    arms: list[Arm]
    roofs: list[float]
    """TFLOP/s of a large matrix product in each round."""
    notes: list[str]

    def finish(self, out: Path) -> int:
        """Print and write everything; return 0 where no arm is void, and ours was measured if it was to be."""
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
            console.print(line, markup=False, soft_wrap=True)
        (out / "compare.md").write_text(self.markdown(rows))
        self._write_csv(out / "compare.csv", ranked)
        if problem := self._plot(out / "compare.png", ranked):
            print(problem)
        print(f"report: {out / 'compare.md'}")
        return int(any(self.void(arm) or (arm.reason and arm.name == OURS) for arm in self.arms))

    def void(self, arm: Arm) -> str:
        """Return why an arm is void; "": it is not, or was not measured."""
        if arm.reason:
            return ""
        stored = str(self.workload.stored).removeprefix("torch.")
        # Adapters are stored as each library stores them, in float32 or as the model is.
        return why_void(arm.turns, self.reference, self.bound, None if self.workload.lora_rank else stored)

    def ranked(self) -> list[Arm]:
        """Return the arms: the fastest first, then the void ones, then those not measured."""
        return sorted(
            self.arms, key=lambda arm: (bool(arm.reason), bool(self.void(arm)), -arm.speed if arm.turns else 0)
        )

    def cells(self, arm: Arm) -> list[str]:
        """Return an arm's row. What is void has no ratio."""
        if arm.reason:
            return [arm.name, *[""] * (len(COLUMNS) - 2), f"not measured: {arm.reason}"]
        void, ours = self.void(arm), next((each for each in self.arms if each.name == OURS), None)
        compared = ours is not None and not void and not ours.reason and not self.void(ours)
        worst = max(gated_difference(turn.losses, self.reference.losses) for turn in arm.turns)
        return [
            arm.name,
            f"{arm.speed:,.0f}",
            f"{arm.spread:.0%}",
            f"{ratio(ours.turns, arm.turns):.2f}" if compared and ours is not None else "",
            f"{arm.tflops / statistics.median(self.roofs):.0%}" if self.roofs and not void else "",
            " / ".join(f"{value:.2f}" for value in arm.memory.values()),
            f"{worst:.1e}",
            f"VOID: {void}" if void else "ok",
        ]

    def title(self) -> str:
        """Return what was trained."""
        work = self.workload
        shape = f"hidden {work.shape.hidden}, {work.shape.layers} layers, vocabulary {work.shape.vocabulary:,}"
        what = f"LoRA of rank {work.lora_rank}" if work.lora_rank else "every parameter"
        return f"{shape}; {what}, {work.precision}; {work.rows} rows of {work.seq_len} tokens on {work.device}"

    def lines(self) -> list[str]:
        """Return what is said under the table."""
        work = self.workload
        seconds = "seconds" if work.device == "cuda" else f"processor seconds, {work.threads} thread(s)"
        kinds = {name for arm in self.arms if arm.turns for name in arm.memory}
        kind = "bfloat16" if work.device == "cuda" else "float32"
        roof = f"roof: {statistics.median(self.roofs):.4g} TFLOP/s in a {kind} product" if self.roofs else "no roof"
        rounds = max((len(arm.turns) for arm in self.arms), default=0)
        versions = {name: version for arm in self.arms for turn in arm.turns for name, version in turn.versions.items()}
        return [
            f"per {seconds}; medians of {rounds} rounds of {work.steps} steps after {work.warmup}; {roof}",
            f"void above a loss difference of {self.bound:.0e} from a bare loop in the first {GATED_STEPS} steps; "
            f"peak GiB: {' / '.join(sorted(kinds))}",
            *self._adapters(),
            ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
            *self.notes,
        ]

    def _adapters(self) -> list[str]:
        if not self.workload.lora_rank:
            return []
        kinds = {arm.name: ", ".join(arm.turns[0].settings["dtypes"]) for arm in self.arms if arm.turns}
        return [f"adapters stored in: {'; '.join(f'{name} {kind}' for name, kind in kinds.items())}"]

    def markdown(self, rows: list[list[str]]) -> str:
        """Return the table and the lines under it."""
        table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
        told = [f"- {line}" for line in self.lines()]
        return "\n".join([f"# {self.title()}", "", f"`{self.command}`", "", *lines, "", *told, ""])

    def _write_csv(self, file: Path, ranked: list[Arm]) -> None:
        """Every turn in full."""
        with file.open("w", newline="") as opened:
            writer = csv.writer(opened, lineterminator="\n")
            names = ["seconds", "processor_seconds", "cost", "targets", "flops"]
            writer.writerow(["arm", "round", *names, "memory_gib", "settings", "versions", "losses", "verdict"])
            for arm in ranked:
                verdict = arm.reason or self.void(arm) or "ok"
                if not arm.turns:
                    writer.writerow([arm.name, *[""] * 10, verdict])
                for number, turn in enumerate(arm.turns, 1):
                    told = [turn.memory, turn.settings, turn.versions, turn.losses]
                    writer.writerow([arm.name, number, *(getattr(turn, name) for name in names), *told, verdict])

    def _plot(self, file: Path, ranked: list[Arm]) -> str | None:
        if importlib.util.find_spec("matplotlib") is None:
            return "no plot: matplotlib is not installed (pip install 'meshbook[plot]')"
        from matplotlib.figure import Figure

        measured = [arm for arm in ranked if not arm.reason]
        figure = Figure(figsize=(11, 4), layout="constrained")
        bars, curves = figure.subplots(1, 2)
        good = [arm for arm in measured if not self.void(arm)]
        bars.barh([arm.name for arm in good], [arm.speed for arm in good], color="tab:blue")
        bars.invert_yaxis()
        bars.set(xlabel="target tokens per second", title="what is void is not drawn")
        curves.plot(self.reference.losses, "k--", label="bare loop, reference", zorder=3)
        for arm in measured:
            curves.plot(arm.turns[0].losses, linewidth=1, label=f"{arm.name}{', VOID' if self.void(arm) else ''}")
        curves.set(xlabel="optimizer step", ylabel="loss per target token (nats)")
        curves.grid(alpha=0.3)
        curves.legend(fontsize=8)
        figure.suptitle(self.title(), fontsize=9)
        figure.savefig(file, dpi=120)
        return None
