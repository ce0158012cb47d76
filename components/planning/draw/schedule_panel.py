"""Timeline of a pipeline schedule: what each pp rank computes, and when it is idle."""

from __future__ import annotations

import math
from dataclasses import dataclass

from components.config.schema.parallelism import ParallelismConfig
from components.planning.draw.rank_panel import LEFT, WIDTH
from components.planning.draw.svg import FAINT, INK, MUTED, PAPER, RULE, SvgCanvas, text_width, tinted, wrapped
from components.planning.formulas.pipeline import (
    Interval,
    StageSeconds,
    WorkKind,
    pipeline_seconds,
    rank_seconds,
    timeline,
)

MOST_MICRO_BATCHES = 16
KIND_COLORS = {
    WorkKind.forward: "#2f77b7",
    WorkKind.backward: "#2e8b57",
    WorkKind.input_gradient: "#3aa394",
    WorkKind.weight_gradient: "#d9a520",
}
KIND_NAMES = {
    WorkKind.forward: "forward",
    WorkKind.backward: "backward",
    WorkKind.input_gradient: "gradients of inputs",
    WorkKind.weight_gradient: "gradients of weights",
}
LABELS = 60.0
"""Width of the names of the ranks."""


@dataclass(frozen=True, slots=True)
class ScheduleDrawing:
    """A pipeline schedule to draw."""

    parallelism: ParallelismConfig
    pp: int
    micro_batches: int
    stages: tuple[StageSeconds, ...]
    send_seconds: float = 0.0
    bubble: float | None = None
    """Share of a step that the slowest rank is idle, which the bar of the step's time shows; None: no bar."""
    is_measured_in_seconds: bool = True
    """False: the stages are equal, and the time of a stage's forward is 1."""

    @property
    def drawn(self) -> int:
        """Number of micro-batches drawn: all, or as many whole rounds of pp as fit into about 16."""
        rounds = 2 if self.parallelism.pp_schedule == "DualPipeV" else 1
        return min(self.micro_batches, self.pp * max(rounds, MOST_MICRO_BATCHES // self.pp))


def draw_schedule(canvas: SvgCanvas, y: float, drawing: ScheduleDrawing) -> float:
    """Draw the timeline; return the y below."""
    schedule, ranks = drawing.parallelism.pp_schedule, drawing.parallelism.stage_ranks(drawing.pp)
    intervals = timeline(schedule, ranks, drawing.stages, drawing.drawn, drawing.send_seconds)
    end = max(each.start + each.seconds for each in intervals)
    canvas.text(LEFT, y + 16, f"Pipeline schedule {schedule}", size=16, bold=True)
    for line in wrapped(_caption(drawing, intervals, end), WIDTH, 12.5):
        canvas.text(LEFT, y + 38, line, size=12.5, color=MUTED)
        y += 16
    y += 38
    height = max(8.0, min(28.0, 480 / drawing.pp))
    left, scale = LEFT + LABELS, (WIDTH - LABELS) / end
    for rank in range(drawing.pp):
        top = y + rank * height
        canvas.rect((left, top, end * scale, height - 2), FAINT, idle=rank)
        if height >= 14 or rank % 4 == 0:
            canvas.text(left - 8, top + height / 2 + 3, f"pp {rank}", anchor="end", size=12 if height >= 14 else 11)
    for each in intervals:
        chunk = each.stage // drawing.pp
        color = tinted(KIND_COLORS[each.kind], max(0.4, 1 - 0.4 * chunk))
        x, top, width = left + each.start * scale, y + each.rank * height, each.seconds * scale
        canvas.rect(
            (x, top, width, height - 2),
            color,
            stroke=PAPER,
            stroke_width=0.6,
            tooltip=f"{KIND_NAMES[each.kind]} of micro-batch {each.micro_batch}, stage {each.stage}",
            pp_rank=each.rank,
            kind=each.kind.value,
            stage=each.stage,
            micro_batch=each.micro_batch,
        )
        label = str(each.micro_batch)
        if height >= 14 and width >= text_width(label, 11) + 2:
            shade = PAPER if chunk == 0 and each.kind is not WorkKind.weight_gradient else INK
            canvas.text(x + width / 2, top + height / 2 + 3, label, size=11, anchor="middle", color=shade)
    y += drawing.pp * height + 6
    _draw_time_axis(canvas, y, end, scale, drawing)
    return _draw_kinds(canvas, y + 50, drawing, {each.kind for each in intervals})


def _caption(drawing: ScheduleDrawing, intervals: list[Interval], end: float) -> str:
    idle = 1 - sum(each.seconds for each in intervals) / (end * drawing.pp)
    if drawing.drawn == drawing.micro_batches:
        text = f"{drawing.drawn} micro-batches (numbered). Gray is idle: {idle:.0%} of the ranks' time"
    else:
        ranks = drawing.parallelism.stage_ranks(drawing.pp)
        schedule, number = drawing.parallelism.pp_schedule, drawing.micro_batches
        seconds, _ = pipeline_seconds(schedule, ranks, drawing.stages, number)
        busy = number * sum(each.forward + each.backward for each in rank_seconds(ranks, drawing.stages))
        whole = max(0.0, 1 - busy / (seconds * drawing.pp))
        text = (
            f"Cut: {drawing.drawn} micro-batches (numbered) of {number:,}. Gray is idle: {idle:.0%} of the ranks' time "
            f"here, about {whole:.0%} with all {number:,}"
        )
    if drawing.bubble is None:
        text += ", the pipeline bubble."
    else:
        text += f": pipeline bubble ({drawing.bubble:.0%} of the step) and waits for the slowest rank."
    if not drawing.is_measured_in_seconds:
        text += " Assumed: equal stages, backward = 2 x forward."
    return text


def _draw_time_axis(canvas: SvgCanvas, y: float, end: float, scale: float, drawing: ScheduleDrawing) -> None:
    left = LEFT + LABELS
    unit, name = (1.0, "forwards of a stage") if not drawing.is_measured_in_seconds else (1e-3, "ms")
    if drawing.is_measured_in_seconds and end >= 1:
        unit, name = 1.0, "s"
    step = 10 ** math.floor(math.log10(end / unit / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if end / unit / (factor * step) <= 8)
    canvas.line([(left, y), (left + end * scale, y)], RULE)
    for tick in range(int(end / unit / step) + 1):
        x = left + tick * step * unit * scale
        canvas.line([(x, y), (x, y + 5)], MUTED)
        canvas.text(x, y + 18, f"{tick * step:g}", color=MUTED, anchor="middle")
    canvas.text(LEFT + WIDTH, y + 34, f"time in {name}", color=MUTED, anchor="end")


def _draw_kinds(canvas: SvgCanvas, y: float, drawing: ScheduleDrawing, kinds: set[WorkKind]) -> float:
    """Draw the legend of the colors."""
    x = LEFT + LABELS
    names = [(KIND_COLORS[kind], KIND_NAMES[kind]) for kind in KIND_NAMES if kind in kinds]
    for color, name in [*names, (FAINT, "idle")]:
        canvas.rect((x, y - 11, 14, 14), color, stroke=RULE if color == FAINT else "none")
        canvas.text(x + 20, y, name, size=12.5)
        x += 44 + text_width(name, 12.5)
    if len(drawing.stages) > drawing.pp:
        note = f"lighter: the later of a rank's {len(drawing.stages) // drawing.pp} stages"
        canvas.text(x, y, note, size=12.5, color=MUTED)
    return y + 24
