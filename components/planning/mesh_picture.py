"""Picture of a mesh for a row of scripts/plan.py or for a run's mesh.svg: ranks, pipeline schedule, memory and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from components.config.mesh_rules import fitting_micro_batch
from components.config.schema.parallelism import MeshShape, ParallelismConfig
from components.config.schema.recipes import TrainConfig
from components.planning.formulas.hardware import Hardware
from components.planning.formulas.memory import MemoryEstimate
from components.planning.formulas.memory_check import GIB, usable_bytes
from components.planning.formulas.pipeline import (
    Interval,
    StageSeconds,
    WorkKind,
    pipeline_seconds,
    rank_seconds,
    timeline,
)
from components.planning.formulas.ranking import Plan, estimate_run
from components.planning.formulas.step_time import BUBBLE, StepTime
from components.planning.formulas.workload import Term, Workload, bytes_text, seconds_text, three_digits, total
from components.planning.rank_panel import (
    FAINT,
    INK,
    LEFT,
    MUTED,
    PAPER,
    RULE,
    WIDTH,
    RankLayout,
    SvgCanvas,
    draw_axes,
    draw_ranks,
    text_width,
    tinted,
    wrapped,
)

_MOST_MICRO_BATCHES = 16
_KIND_COLORS = {
    WorkKind.forward: "#2f77b7",
    WorkKind.backward: "#2e8b57",
    WorkKind.input_gradient: "#3aa394",
    WorkKind.weight_gradient: "#d9a520",
}
_KIND_NAMES = {
    WorkKind.forward: "forward",
    WorkKind.backward: "backward",
    WorkKind.input_gradient: "gradients of inputs",
    WorkKind.weight_gradient: "gradients of weights",
}
_LABELS = 60.0
"""Width of the names of the ranks."""
_PALETTE = (
    "#1f6fb2",
    "#e08b27",
    "#2e8b57",
    "#b03a5b",
    "#7b5fb5",
    "#3aa6b9",
    "#c9a227",
    "#6b7f8f",
    "#d2691e",
    "#8a9a3b",
    "#5a6acf",
    "#a0785a",
)
HEIGHT, BAR = 300.0, 96.0
_LABEL = 20.0
"""Smallest distance of two labels."""
_MOST_TERMS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPicture:
    """Contents of the picture; a part that is None is left out."""

    title: str
    facts: tuple[str, ...]
    """Lines below the title."""
    layout: RankLayout
    parallelism: ParallelismConfig
    memory: TermBar | None = None
    time: TermBar | None = None
    schedule: ScheduleDrawing | None = None


def render_mesh(picture: MeshPicture) -> str:
    """Return the picture as an SVG file, the same text for the same contents."""
    canvas = SvgCanvas()
    y = 30.0
    for line in wrapped(picture.title, WIDTH, 22, bold=True):
        y += 16
        canvas.text(LEFT, y, line, size=22, bold=True)
        y += 12
    for fact in picture.facts:
        for line in wrapped(fact, WIDTH, 14):
            y += 20
            canvas.text(LEFT, y - 4, line, size=14, color=MUTED)
    y = _rule(canvas, y + 14)
    y = _rule(canvas, draw_axes(canvas, y, picture.layout, picture.parallelism))
    y = draw_ranks(canvas, y, picture.layout)
    bars = [each for each in (picture.memory, picture.time) if each is not None]
    if bars:
        y = _rule(canvas, y)
        half = WIDTH / 2 + 12
        if max(map(_bar_width, bars)) < WIDTH - half:
            y = max(_draw_bar(canvas, LEFT + 8 + index * half, y, bar) for index, bar in enumerate(bars))
        else:
            for bar in bars:
                y = _draw_bar(canvas, LEFT + 8, y, bar)
    if picture.schedule is not None:
        y = _draw_schedule(canvas, _rule(canvas, y), picture.schedule)
    return canvas.document(WIDTH + 2 * LEFT, y + 16, picture.title)


def picture_of_plan(plan: Plan, hardware: Hardware, ranks_per_node: int, title: str) -> MeshPicture:
    """Return the picture of a plan."""
    return _estimated(plan.workload, plan.memory, plan.time, hardware, ranks_per_node, title)


def picture_of_run(
    cfg: TrainConfig, mesh: MeshShape, ranks_per_node: int, title: str, measured_bytes: int | None = None
) -> MeshPicture:
    """Return the picture of a run: with estimates if its device is set and its model's sizes are known.

    Args:
        measured_bytes: Peak memory of rank 0; None: not measured yet.
    """
    if (run := estimate_run(cfg, mesh)) is not None:
        return _estimated(run.workload, run.memory, run.time, run.hardware, ranks_per_node, title, measured_bytes)
    return MeshPicture(
        title=title,
        facts=(f"{mesh.summary}, {ranks_per_node} per node",),
        layout=RankLayout(mesh, ranks_per_node),
        parallelism=cfg.parallelism,
        schedule=_assumed_schedule(cfg, mesh) if mesh.pp > 1 else None,
    )


def _assumed_schedule(cfg: TrainConfig, mesh: MeshShape) -> ScheduleDrawing:
    """Return a schedule of equal stages whose backward takes twice as long as their forward."""
    training, parallelism = cfg.training, cfg.parallelism
    size = fitting_micro_batch(training, parallelism, mesh) or training.micro_batch_size
    number = max(1, training.global_batch_size // (mesh.dp * size))
    stages = (StageSeconds(1.0, 2.0, 1.0),) * len(parallelism.stage_ranks(mesh.pp))
    return ScheduleDrawing(parallelism, mesh.pp, number, stages, is_measured_in_seconds=False)


def _estimated(
    workload: Workload,
    memory: MemoryEstimate,
    time: StepTime,
    hardware: Hardware,
    ranks_per_node: int,
    title: str,
    measured_bytes: int | None = None,
) -> MeshPicture:
    mesh, parallelism = workload.mesh, workload.parallelism
    limits = [("usable", usable_bytes(hardware))] if hardware.is_gpu else []
    limits.append((f"memory of {hardware.name}", hardware.memory_bytes))
    if measured_bytes is not None:
        measured = "measured peak of rank 0" if hardware.is_gpu else "rank 0's process, with Python and torch"
        limits.append((measured, measured_bytes))
    bubble = total(each for each in time.terms if each.name == BUBBLE) / time.seconds
    schedule = ScheduleDrawing(parallelism, mesh.pp, workload.micro_batches, time.stages, time.send_seconds, bubble)
    unit, unit_name = (1.0, "s") if time.seconds >= 1 else (1e-3, "ms")
    where = f"pp coordinate {memory.stage}, " if mesh.pp > 1 else ""
    return MeshPicture(
        title=title,
        facts=(
            f"{mesh.summary} x {hardware.name}, {ranks_per_node} per node",
            f"{workload.parameters_text}; {workload.tokens_text}; micro-batches of a rank: "
            f"{workload.micro_batches_text}; activation checkpointing: {parallelism.activation_checkpointing}",
            f"estimated: {seconds_text(time.seconds)} per step, {three_digits(time.tokens_per_second_per_gpu)} "
            f"tokens/s per rank, MFU {time.mfu:.0%}, peak memory {bytes_text(memory.peak)}",
        ),
        layout=RankLayout(mesh, ranks_per_node),
        parallelism=parallelism,
        memory=TermBar(
            "Memory of the fullest rank",
            memory.terms,
            GIB,
            "GiB",
            tuple(limits),
            f"{bytes_text(memory.peak)} estimated; {where}when {memory.moment}",
        ),
        time=TermBar(
            "Time of an optimizer step",
            _largest_terms(time.terms),
            unit,
            unit_name,
            caption=f"{seconds_text(time.seconds)} estimated; communication that computation hides is left out",
        ),
        schedule=schedule if mesh.pp > 1 else None,
    )


def _rule(canvas: SvgCanvas, y: float) -> float:
    """Draw a line between two panels; return the y of the next one."""
    canvas.line([(LEFT, y), (LEFT + WIDTH, y)], RULE)
    return y + 18


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
        return min(self.micro_batches, self.pp * max(rounds, _MOST_MICRO_BATCHES // self.pp))


def _draw_schedule(canvas: SvgCanvas, y: float, drawing: ScheduleDrawing) -> float:
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
    left, scale = LEFT + _LABELS, (WIDTH - _LABELS) / end
    for rank in range(drawing.pp):
        top = y + rank * height
        canvas.rect((left, top, end * scale, height - 2), FAINT, idle=rank)
        if height >= 14 or rank % 4 == 0:
            canvas.text(left - 8, top + height / 2 + 3, f"pp {rank}", anchor="end", size=12 if height >= 14 else 11)
    for each in intervals:
        chunk = each.stage // drawing.pp
        color = tinted(_KIND_COLORS[each.kind], max(0.4, 1 - 0.4 * chunk))
        x, top, width = left + each.start * scale, y + each.rank * height, each.seconds * scale
        canvas.rect(
            (x, top, width, height - 2),
            color,
            stroke=PAPER,
            stroke_width=0.6,
            tooltip=f"{_KIND_NAMES[each.kind]} of micro-batch {each.micro_batch}, stage {each.stage}",
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
    left = LEFT + _LABELS
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
    x = LEFT + _LABELS
    names = [(_KIND_COLORS[kind], _KIND_NAMES[kind]) for kind in _KIND_NAMES if kind in kinds]
    for color, name in [*names, (FAINT, "idle")]:
        canvas.rect((x, y - 11, 14, 14), color, stroke=RULE if color == FAINT else "none")
        canvas.text(x + 20, y, name, size=12.5)
        x += 44 + text_width(name, 12.5)
    if len(drawing.stages) > drawing.pp:
        note = f"lighter: the later of a rank's {len(drawing.stages) // drawing.pp} stages"
        canvas.text(x, y, note, size=12.5, color=MUTED)
    return y + 24


@dataclass(frozen=True, slots=True)
class TermBar:
    """A stacked bar: the first term at the bottom."""

    title: str
    terms: tuple[Term, ...]
    unit: float
    """Value that is printed as 1."""
    unit_name: str
    limits: tuple[tuple[str, float], ...] = ()
    """Lines across the bar with their names, in the unit of the terms; the highest one is the top of the scale."""
    caption: str = ""

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.unit_name == "GiB":
            return bytes_text(value)
        return f"{three_digits(value / self.unit)} {self.unit_name}"

    @property
    def scale(self) -> float:
        """Value at the top of the bar."""
        return max([total(self.terms), *(value for _, value in self.limits), 1e-12])


def _largest_terms(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return the largest terms first, and the sum of the others."""
    ordered = sorted((each for each in terms if each.value > 0), key=lambda each: -each.value)
    if len(ordered) <= _MOST_TERMS:
        return tuple(ordered)
    rest = ordered[_MOST_TERMS - 1 :]
    others = Term(f"{len(rest)} smaller terms", total(rest), ", ".join(each.name for each in rest))
    return (*ordered[: _MOST_TERMS - 1], others)


def _bar_width(bar: TermBar) -> float:
    """Return the approximate width of a bar with its labels."""
    number = f": 12,345 {bar.unit_name}"
    widths = [text_width(f"{each.name}{number} (12%)", 13) for each in bar.terms]
    widths += [text_width(f"{name}{number}", 13, bold=True) for name, _ in bar.limits]
    return BAR + 42 + max(widths, default=0.0)


def _draw_bar(canvas: SvgCanvas, x: float, y: float, bar: TermBar) -> float:
    """Draw a bar with its labels; return the y below."""
    canvas.text(x, y + 16, bar.title, size=16, bold=True)
    for index, line in enumerate(wrapped(bar.caption, 560, 12.5)):
        y += 16 * bool(index)
        canvas.text(x, y + 36, line, size=12.5, color=MUTED)
    length = max(HEIGHT, _LABEL * (len(bar.terms) + len(bar.limits)))
    top, bottom = y + 56, y + 56 + length
    pixels = length / bar.scale
    labels: list[tuple[float, str, str, bool]] = []
    if bar.limits:
        canvas.rect((x, top, BAR, length), FAINT, stroke=RULE)
    level = bottom
    for index, term in enumerate(bar.terms):
        height, color = term.value * pixels, _PALETTE[index % len(_PALETTE)]
        level -= height
        value = bar.text(term.value)
        tooltip = f"{term.name}: {value} = {term.formula}"
        canvas.rect(
            (x, level, BAR, height), color, tooltip=tooltip, term=term.name, value=f"{term.value:.6g}", bar=bar.title
        )
        share = term.value / max(total(bar.terms), 1e-12)
        percent = f"{share:.0%}" if share >= 0.01 else "<1%"
        labels.append((level + height / 2, f"{term.name}: {value} ({percent})", color, False))
    for name, limit in bar.limits:
        level = bottom - limit * pixels
        canvas.line([(x - 6, level), (x + BAR + 6, level)], INK, width=1.6, dash="5 3")
        labels.append((level, f"{name}: {bar.text(limit)}", INK, True))
    labels.sort(key=lambda each: each[0])
    for (anchor, text, color, is_limit), at in zip(
        labels, _spread([each[0] for each in labels], top, bottom), strict=True
    ):
        start = x + BAR + (6 if is_limit else 0)
        canvas.line([(start, anchor), (x + BAR + 12, anchor), (x + BAR + 30, at), (x + BAR + 36, at)], color)
        canvas.text(x + BAR + 42, at + 4, text, size=13, bold=is_limit)
    return bottom + 32


def _spread(anchors: Sequence[float], top: float, bottom: float) -> list[float]:
    """Return positions near sorted anchors, at least _LABEL apart and not below `bottom`, if there is room."""
    positions: list[float] = []
    for anchor in anchors:
        positions.append(max(anchor, positions[-1] + _LABEL if positions else top))
    limit = bottom
    for index in reversed(range(len(positions))):
        positions[index] = min(positions[index], limit)
        limit = positions[index] - _LABEL
    return positions
