"""The picture of a mesh, for a row of scripts/plan.py and for a run's mesh.svg."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.micro_batches import fitting_micro_batch
from components.config.schema.parallelism import MeshShape, ParallelismConfig
from components.config.schema.recipes import TrainConfig
from components.planning.draw.rank_layout import RankLayout
from components.planning.draw.rank_panel import LEFT, WIDTH, draw_axes, draw_ranks
from components.planning.draw.schedule_panel import ScheduleDrawing, draw_schedule
from components.planning.draw.svg import MUTED, RULE, SvgCanvas, wrapped
from components.planning.draw.term_bar import TermBar, bar_width, draw_bar, largest_terms
from components.planning.formulas.hardware import Hardware
from components.planning.formulas.memory import MemoryEstimate
from components.planning.formulas.memory_check import GIB, usable_bytes
from components.planning.formulas.pipeline import StageSeconds
from components.planning.formulas.ranking import Plan, estimate_run
from components.planning.formulas.step_time import BUBBLE, StepTime
from components.planning.formulas.term import bytes_text, seconds_text, three_digits, total
from components.planning.formulas.workload import Workload


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
        if max(map(bar_width, bars)) < WIDTH - half:
            y = max(draw_bar(canvas, LEFT + 8 + index * half, y, bar) for index, bar in enumerate(bars))
        else:
            for bar in bars:
                y = draw_bar(canvas, LEFT + 8, y, bar)
    if picture.schedule is not None:
        y = draw_schedule(canvas, _rule(canvas, y), picture.schedule)
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
            largest_terms(time.terms),
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
