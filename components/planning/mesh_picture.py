"""Picture of a mesh for a row of scripts/plan.py or for a run's mesh.svg: ranks, pipeline schedule, memory and time.

The functions here compute what is shown; the template mesh.svg.j2 draws it.
"""

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from components.config.mesh_rules import fitting_micro_batch
from components.config.schema.parallelism import AXES, ContextAttention, MeshShape, ParallelismConfig
from components.config.schema.recipes import TrainConfig
from components.planning.formulas import pipeline
from components.planning.formulas.hardware import Hardware
from components.planning.formulas.ranking import Plan, RunEstimate, usable_bytes
from components.planning.formulas.step_time import BUBBLE
from components.planning.formulas.workload import Term, bytes_text, seconds_text, three_digits, total

_BAR, _LABEL, _TIMELINE = 300.0, 20.0, 1076.0
"""Least height of a stacked bar, distance of its labels, and width of a pipeline schedule, in pixels."""
_MOST_NODES, _MOST_RANKS, _MOST_MICRO_BATCHES = 8, 512, 16
"""Nodes and ranks up to which all are drawn in full, and micro-batches of a pipeline schedule."""
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML, even escaped


class _TermBar(NamedTuple):
    """A stacked bar: the first term at the bottom, and lines across it at its limits."""

    title: str
    terms: tuple[Term, ...]
    text: Callable[[float], str]  # formats a value with its unit
    limits: tuple[tuple[str, float], ...] = ()


class _Schedule(NamedTuple):
    """A step of a pipeline schedule."""

    micro_batches: int
    stages: tuple[pipeline.StageSeconds, ...]
    send_seconds: float = 0.0
    bubble: float | None = None
    """Share of a step that the slowest rank is idle; None: stages are assumed equal, a forward of one takes 1."""


class _MeshPicture(NamedTuple):
    """Contents of the picture."""

    title: str
    facts: tuple[str, ...]  # lines below the title
    mesh: MeshShape
    ranks_per_node: int
    parallelism: ParallelismConfig
    bars: tuple[_TermBar, ...] = ()
    schedule: _Schedule | None = None


def picture_of_plan(plan: Plan, hardware: Hardware, ranks_per_node: int, title: str) -> _MeshPicture:
    """Return the picture of a plan."""
    return _estimated(RunEstimate(hardware, plan.workload, plan.memory, plan.time), ranks_per_node, title)


def picture_of_run(
    cfg: TrainConfig, mesh: MeshShape, estimate: RunEstimate | None, ranks_per_node: int, title: str
) -> _MeshPicture:
    """Return the picture of a run: with its estimates if there are any, that is if its device is set and its model's
    sizes are known."""
    if estimate is not None:
        return _estimated(estimate, ranks_per_node, title)
    training, parallelism = cfg.training, cfg.parallelism
    rows = mesh.dp * (fitting_micro_batch(training, parallelism, mesh) or training.micro_batch_size)
    stages = (pipeline.StageSeconds(1.0, 2.0, 1.0),) * len(parallelism.stage_ranks(mesh.pp))
    schedule = _Schedule(max(1, training.global_batch_size // rows), stages) if mesh.pp > 1 else None
    fact = f"{mesh.summary}, {ranks_per_node} per node"
    return _MeshPicture(title, (fact,), mesh, ranks_per_node, parallelism, schedule=schedule)


def _estimated(run: RunEstimate, ranks_per_node: int, title: str) -> _MeshPicture:
    work, memory, time, hardware = run.workload, run.memory, run.time, run.hardware
    mesh, parallelism = work.mesh, work.parallelism
    stage = f" on pp coordinate {memory.stage}" if mesh.pp > 1 else ""
    facts = (
        f"{mesh.summary} x {hardware.name}, {ranks_per_node} per node",
        f"{work.parameters_text}; {work.tokens_text}; micro-batches of a rank: {work.micro_batches_text}; activation "
        f"checkpointing: {parallelism.activation_checkpointing}",
        f"estimated: {seconds_text(time.seconds)} per step (communication that computation hides is left out), "
        f"{three_digits(time.tokens_per_second_per_gpu)} tokens/s per rank, MFU {time.mfu:.0%}",
        f"estimated: peak memory {bytes_text(memory.peak)}{stage}, when {memory.moment}",
    )
    usable = [("usable", usable_bytes(hardware))] if hardware.is_gpu else []
    limits = (*usable, (f"memory of {hardware.name}", hardware.memory_bytes))
    terms = tuple(sorted((term for term in time.terms if term.value > 0), key=lambda each: -each.value))
    memory_bar = _TermBar("Memory of the fullest rank", memory.terms, bytes_text, limits)
    time_bar = _TermBar("Time of an optimizer step", terms, seconds_text)
    bubble = total(term for term in terms if term.name == BUBBLE) / time.seconds
    schedule = _Schedule(work.micro_batches, time.stages, time.send_seconds, bubble) if mesh.pp > 1 else None
    return _MeshPicture(title, facts, mesh, ranks_per_node, parallelism, (memory_bar, time_bar), schedule)


def render_mesh(picture: _MeshPicture) -> str:
    """Return the picture as an SVG file, the same text for the same contents."""
    mesh, parallelism, per_node = picture.mesh, picture.parallelism, picture.ranks_per_node
    length = max([_BAR, *(_LABEL * (len(bar.terms) + len(bar.limits)) for bar in picture.bars)])
    bars = [(bar, *_bar(bar, length)) for bar in picture.bars]
    schedule = picture.schedule and _timeline(picture.schedule, parallelism, mesh.pp)
    values: dict[str, Any] = {"picture": picture, "bars": bars, "length": length, "schedule": schedule}
    values |= _ranks(mesh, per_node) | {"movement": _movement(mesh, parallelism)}
    return _INVALID.sub("?", _template().render(values))


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined  # a process that draws nothing does not load it

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.finalize = lambda value: f"{value:g}" if isinstance(value, float) else value
    environment.filters |= {"wrap": _wrapped, "ranks": _ranks_text, "comma": "{:,}".format}
    return environment.from_string(Path(__file__).with_name("mesh.svg.j2").read_text(encoding="utf-8"))


def _movement(mesh: MeshShape, parallelism: ParallelismConfig) -> dict[str, str]:
    """Return what the collectives of each axis move."""
    keys = {
        ContextAttention.ulysses: "queries, keys, values and outputs of attention (all-to-all)",
        ContextAttention.all_gather: "keys and values (all-gather)",
        ContextAttention.auto: "queries, keys and values (all-to-all, or all-gather of keys and values)",
    }
    also = "; dense parameters are sharded over it too"
    of_shards = " of each shard" if mesh.dp_shard * mesh.ep * mesh.cp > 1 else ""
    hidden = "all-gather and reduce-scatter" if parallelism.sequence_parallel else "all-reduce"
    return {
        "pp": "hidden states to the next stage, their gradients back (send and receive)",
        "dp_replicate": f"gradients (all-reduce){of_shards}",
        "dp_shard": "parameters of each layer (all-gather), gradients (reduce-scatter)",
        "ep": f"tokens to the ranks of their experts, and back (all-to-all){also}",
        "cp": f"{keys[parallelism.cp_attention]}{also}",
        "tp": f"hidden states at attention and MLP of each layer ({hidden})",
    }


def _ranks(mesh: MeshShape, per_node: int) -> dict[str, Any]:
    """Return rank 0's groups, the ranks of each node, the nodes of each group, and the nodes drawn in full: a list of
    rank, coordinates, and the axis on which it is in rank 0's group."""
    groups: dict[str, range] = {}
    stride = 1  # consecutive ranks fill the innermost axis first, and node after node
    for axis in reversed([axis for axis in AXES if mesh.degree(axis) > 1]):
        groups = {axis: range(0, stride * mesh.degree(axis), stride)} | groups
        stride *= mesh.degree(axis)
    nodes = [range(first, min(first + per_node, mesh.world)) for first in range(0, mesh.world, per_node)]
    reached = {axis: {rank // per_node for rank in group} for axis, group in groups.items()}
    colors = {node: axis for axis in reversed(groups) for node in reached[axis]} | {0: "first"}
    full = list(range(len(nodes)))
    if len(nodes) > _MOST_NODES or mesh.world > _MOST_RANKS:  # node 0, and the next one of each group that leaves it
        full = sorted({0, *(min(each - {0}) for each in reached.values() if len(each) > 1)})[:4]
    shown: dict[int, list[Any]] = {node: [] for node in full}
    for rank in (rank for node in full for rank in nodes[node]):
        coordinates = {axis: rank // group.step % len(group) for axis, group in groups.items()}
        axes = [axis for axis, value in coordinates.items() if value]  # one: a member of rank 0's group on that axis
        shown[rank // per_node].append((rank, coordinates, axes[0] if len(axes) == 1 else ""))
    return {"groups": groups, "nodes": nodes, "reached": reached, "colors": colors, "shown": shown}


def _bar(bar: _TermBar, length: float) -> tuple[list[Any], list[Any]]:
    """Return the segments and the labels of a bar, with their distances from its top."""
    everything = max(total(bar.terms), 1e-12)
    scale = length / max([everything, *(value for _, value in bar.limits)])
    segments, labels, top = [], [], length
    for index, term in enumerate(bar.terms):
        text, height, share = f"{term.name}: {bar.text(term.value)}", term.value * scale, term.value / everything
        top -= height
        segments.append((term, text, top, height))
        percent = f"{share:.0%}" if share >= 0.01 else "<1%"
        labels.append((top + height / 2, f"{text} ({percent})", f"term{index % 12}"))
    labels += [(length - value * scale, f"{name}: {bar.text(value)}", "limit") for name, value in bar.limits]
    labels.sort(key=lambda label: -label[0])
    # Keep labels apart: move them up, starting at the lowest one, then those above the bar down again.
    up = list(accumulate((label[0] for label in labels), lambda below, at: min(at, below - _LABEL)))
    down = list(accumulate(reversed(up), lambda above, at: max(at, above + _LABEL), initial=-_LABEL))
    return segments, list(zip(labels, reversed(down[1:]), strict=True))


def _timeline(drawing: _Schedule, parallelism: ParallelismConfig, pp: int) -> tuple[Any, ...]:
    """Return caption, boxes, ticks and unit of the timeline of all micro-batches, or as many rounds as fit into 16."""
    name, ranks, number = parallelism.pp_schedule, parallelism.stage_ranks(pp), drawing.micro_batches
    drawn = min(number, pp * max(2 if name == "DualPipeV" else 1, _MOST_MICRO_BATCHES // pp))
    work = pipeline.timeline(name, ranks, drawing.stages, drawn, drawing.send_seconds)
    end = max(each.start + each.seconds for each in work)
    idle = f"Gray is idle: {1 - sum(each.seconds for each in work) / (end * pp):.0%} of the ranks' time"
    caption = f"{drawn} micro-batches (numbered). {idle}"
    if drawn < number:
        seconds, _ = pipeline.pipeline_seconds(name, ranks, drawing.stages, number)
        whole = max(0.0, 1 - number * sum(stage.forward + stage.backward for stage in drawing.stages) / (seconds * pp))
        caption = f"Cut: {drawn} micro-batches (numbered) of {number:,}. {idle} here, about {whole:.0%} with all"
    unit, unit_name = (1.0, "s") if end >= 1 else (1e-3, "ms")
    if drawing.bubble is None:
        unit, unit_name = 1.0, "forwards of a stage"
        caption += ", the pipeline bubble. Assumed: equal stages, backward = 2 x forward."
    else:
        caption += f": pipeline bubble ({drawing.bubble:.0%} of the step) and waits for the slowest rank."
    step = 10 ** math.floor(math.log10(end / unit / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if end / unit / (factor * step) <= 8)
    scale = _TIMELINE / end
    ticks = [(f"{tick * step:g}", tick * step * unit * scale) for tick in range(int(end / unit / step) + 1)]
    boxes = [(each, each.start * scale, each.seconds * scale, each.stage // pp) for each in work]
    return caption, boxes, ticks, unit_name


def _ranks_text(ranks: range) -> str:
    """Return ranks as text: `0, 8, 16, ..., 56`, or `0-7` for more than four neighbors."""
    if len(ranks) > 4 and ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks if len(ranks) <= 5 else [*ranks[:3], "...", ranks[-1]]))


def _wrapped(text: str, width: float, size: float) -> list[str]:
    """Return a text as lines of about `width`, broken at spaces, or anywhere in a word that is longer than a line."""
    # textwrap counts characters. In units of 0.285 of the font size, a space counts as 1, a capital as 3, a wide one as
    # 4 and others as 2: their widths in the widest of usual fonts, DejaVu Sans.
    wide = {each for each in text if each in "mwMW%@" or unicodedata.east_asian_width(each) in "WF"}
    marked = "".join(each + "\0" * (3 if each in wide else 1 + each.isupper() - (each == " ")) for each in text)
    lines = textwrap.wrap(marked, int(width / (0.285 * size)), break_on_hyphens=False)
    return [line.replace("\0", "") for line in lines]
