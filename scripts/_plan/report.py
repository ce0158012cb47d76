"""Tables, JSON and the picture of scripts/plan.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.config.schema.parallelism import AXES, ActivationCheckpointing, Strategy
from components.planning.formulas.families import LinearKind
from components.planning.formulas.policies import GIB
from components.planning.formulas.ranking import Plan, usable_bytes
from components.planning.formulas.step_time import TIME_ERROR
from components.planning.formulas.workload import Term, bytes_text, seconds_text, three_digits
from components.planning.mesh_picture import picture_of_plan, render_mesh
from components.planning.simulation import SimulatedRank, simulation_lines
from components.protocol.errors import ConfigError
from components.protocol.run_files import atomic_write, is_replaceable
from components.terminal import fit, fit_command, fit_table, terminal_width
from scripts._plan.options import PlanRequest

HEADER = ("row", "mesh", "micro batches", "memory GiB", "step s", "tokens/s per rank", "MFU", "largest terms")
INDENT = " " * 5
LARGE_MODEL = 1e9
"""Parameters from which a plan for CPUs warns too."""
SMALL_ROWS = 1024
"""Tokens per row below which a plan for GPUs warns, unless the command line sets training.seq_len."""
SMALL_STEP = 4096
"""Tokens per rank and step below which it warns, unless the command line sets training.global_batch_size."""

_MARK = """font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" role="img\""""
"""Attributes of the svg element in mesh.svg.j2, by which a picture is recognized."""


def table_lines(request: PlanRequest, plans: list[Plan]) -> list[str]:
    """Return the ranked table, and the command of its first row."""
    plans = plans[: request.options.top]
    equal = _equal_rows(plans)
    rows = [_row(number, plan, first) for number, (plan, first) in enumerate(zip(plans, equal, strict=True), 1)]
    one_line = sum(max(map(len, column)) + 2 for column in zip(HEADER, *rows, strict=True)) - 2 <= terminal_width()
    if one_line:
        lines = [line for row in fit_table(HEADER, rows, {0, 1, 7}) for line in row]
    else:  # the terms go below each row
        (*header,), *body = fit_table(HEADER[:-1], [row[:-1] for row in rows], {0, 1})
        terms = [fit(f"{INDENT}{row[-1]}").split("\n") for row in rows]
        lines = [*header, *(line for row, below in zip(body, terms, strict=True) for line in (*row, *below))]
    number = sum(request.left_out.reasons.values())
    notes = [f"{number:,} other candidates are left out: --left-out prints why; --why ROW prints every term of a row"]
    if len(set(equal)) < len(plans):
        notes.insert(0, _equality(equal))
    return [
        *_summary(request, plans[0]),
        "",
        *lines,
        "",
        *(line for note in notes for line in fit(note).split("\n")),
        "row 1:",
        *fit_command(f"  {request.command(plans[0])}"),
    ]


def _equality(equal: Sequence[int]) -> str:
    """Return what the mark of an equal row means, for the first one."""
    row, first = next((row, first) for row, first in enumerate(equal, 1) if row != first)
    return (
        f"{row}={first}: row {row} counts as fast as row {first}: it is slower by less than the error of the "
        f"estimates, {TIME_ERROR:.0%}; measure such rows: -m parallelism=plan:{len(equal)}"
    )


def _equal_rows(plans: Sequence[Plan]) -> list[int]:
    """Return for each row the number of the first row that is no faster by more than the error of the estimates."""
    first, found = 0, []
    for number, plan in enumerate(plans):
        if plan.time.seconds > plans[first].time.seconds * (1 + TIME_ERROR):
            first = number
        found.append(first + 1)
    return found


def why_lines(request: PlanRequest, plans: list[Plan]) -> list[str]:
    """Return every term of a row with its formula and source."""
    number = min(request.options.why, len(plans))
    plan = plans[number - 1]
    where = f" (pp coordinate {plan.memory.stage})" if plan.candidate.mesh.pp > 1 else ""
    memory = (
        f"memory of the fullest rank{where} when {plan.memory.moment}: {bytes_text(plan.memory.peak)} of "
        f"{bytes_text(usable_bytes(request.hardware))} usable"
    )
    seconds = "{:,.3f} s" if plan.time.seconds >= 1 else "{:,.2f} ms"
    scale = 1.0 if plan.time.seconds >= 1 else 1e3
    lines = [
        *_summary(request, plan),
        "",
        f"row {number}: {mesh_name(plan)}",
        *fit_command(f"  {request.command(plan)}"),
        "",
        *fit(memory).split("\n"),
        *_terms([(term, bytes_text(term.value)) for term in plan.memory.terms]),
        "",
        f"time of a step: {seconds_text(plan.time.seconds)}",
        *_terms([(term, seconds.format(scale * term.value)) for term in plan.time.terms]),
    ]
    if number != request.options.why:
        lines.append(f"row {request.options.why} does not exist; this is the last one")
    return lines


def left_out_lines(request: PlanRequest, plans: list[Plan]) -> list[str]:
    """Return the reasons for leaving candidates out, the most frequent first."""
    rows = [(f"{count:,}", reason) for reason, count in request.left_out.reasons.most_common()]
    table = fit_table(("count", "reason left out"), rows, {1})
    return [*_summary(request, plans[0]), "", *(line for row in table for line in row)]


def as_json(request: PlanRequest, plans: list[Plan], simulated: Sequence[Sequence[SimulatedRank]]) -> str:
    """Return the rows as JSON: bytes and seconds."""
    rows = [_json_row(request, plan) for plan in plans[: request.options.top]]
    for row, runs in zip(rows, simulated, strict=False):
        row["dry_run"] = [run.as_json() for run in runs]
    values = {
        "device": request.hardware.name,
        "world": request.choice.world,
        "parameters": plans[0].workload.parameters,
        "tokens_per_step": plans[0].workload.tokens_per_step,
        "rows": rows,
    }
    return json.dumps(values, indent=1)


def mesh_name(plan: Plan) -> str:
    """Return the axes larger than 1 and what they use: `dp_shard=8 tp=4 sp recompute=full`."""
    parallelism, mesh = plan.candidate.parallelism, plan.candidate.mesh
    policy = parallelism.activation_checkpointing
    recompute = [] if policy is ActivationCheckpointing.none else [f"recompute={policy}"]
    if parallelism.strategy is not Strategy.fsdp2:
        return " ".join([str(parallelism.strategy), *([str(mesh.world)] if mesh.world > 1 else []), *recompute])
    parts = [f"{axis}={mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1] or ["dp_shard=1"]
    if parallelism.sequence_parallel:
        parts.append("sp")
    if mesh.pp > 1:
        parts.append(str(parallelism.pp_schedule))
    return " ".join([*parts, *recompute])


def size_warnings(request: PlanRequest, plan: Plan) -> list[str]:
    """Return warnings for rows or steps that only a first run on a small machine has, and that nobody has set."""
    workload, training, given = plan.workload, request.cfg.training, request.choice.fixed
    if not request.hardware.is_gpu and workload.parameters < LARGE_MODEL:
        return []
    found = []
    if training.seq_len < SMALL_ROWS and "training.seq_len" not in given:
        found.append(
            f"warning: this plan is for rows of {training.seq_len:,} tokens, the training.seq_len of the recipe; "
            "longer rows have another ranking: set the length of yours, such as training.seq_len=4096"
        )
    ranks = request.choice.world
    if workload.tokens_per_step < SMALL_STEP * ranks and "training.global_batch_size" not in given:
        found.append(
            f"warning: training.global_batch_size={training.global_batch_size} gives each of {ranks:,} ranks "
            f"{workload.tokens_per_step // ranks:,} tokens per step; set that of your run, such as "
            f"training.global_batch_size={max(64, 2 * ranks)}"
        )
    return fit("\n\n".join(found)).replace("\n\n", "\n").split("\n") if found else []


def _summary(request: PlanRequest, plan: Plan) -> list[str]:
    text = (
        f"{plan.workload.parameters_text}, {plan.workload.tokens_text}, on {request.choice.world:,} x "
        f"{request.hardware.name} ({request.choice.ranks_per_node} per node)"
    )
    return [*size_warnings(request, plan), *_kernel_warning(request, plan), *fit(text).split("\n")]


def _kernel_warning(request: PlanRequest, plan: Plan) -> list[str]:
    """Return the warning that kernels of linear attention or Mamba-2 are not counted."""
    linear = plan.workload.architecture.family.linear
    if linear is LinearKind.none or plan.workload.kernels or not request.hardware.is_gpu:
        return []
    package = "mamba-ssm" if linear is LinearKind.mamba2 else "flash-linear-attention"
    return fit(
        f"warning: {package} is not installed here, so this plan counts plain PyTorch in its place, which takes more "
        f"memory and time; plan where it is: pip install {package}"
    ).split("\n")


def _row(number: int, plan: Plan, first: int) -> tuple[str, ...]:
    return (
        str(number) if number == first else f"{number}={first}",
        mesh_name(plan),
        plan.workload.micro_batches_text,
        three_digits(plan.memory.peak / GIB),
        three_digits(plan.time.seconds),
        three_digits(plan.time.tokens_per_second_per_gpu),
        f"{plan.time.mfu:.0%}",
        ", ".join(f"{each.name} {each.value / plan.time.seconds:.0%}" for each in _largest(plan)),
    )


def _largest(plan: Plan) -> list[Term]:
    """Return the three longest terms of a step, of at least one percent."""
    ordered = sorted(plan.time.terms, key=lambda each: -each.value)
    return [each for each in ordered[:3] if each.value >= 0.01 * plan.time.seconds]


def _terms(terms: Sequence[tuple[Term, str]]) -> list[str]:
    """Return a line for each term, with its formula below if there is no room beside it."""
    width, digits = max(len(each.name) for each, _ in terms), max(len(value) for _, value in terms)
    lines = []
    for each, text in terms:
        source = f"  [{each.source}]" if each.source else ""
        formula = re.sub(r"(?<![\d,.])1 (layer|micro-batch|round|stage)e?s\b", r"1 \1", each.formula) + source
        value = f"  {each.name:<{width}}  {text:>{digits}}"
        if len(value) + 2 + len(formula) <= terminal_width():
            lines.append(f"{value}  {formula}")
        else:
            lines += [value, *fit(f"{INDENT}{formula}").split("\n")]
    return lines


def _json_row(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    return {
        "mesh": {axis: plan.candidate.mesh.degree(axis) for axis in AXES},
        "strategy": str(plan.candidate.parallelism.strategy),
        "sequence_parallel": plan.candidate.parallelism.sequence_parallel,
        "pp_schedule": str(plan.candidate.parallelism.pp_schedule),
        "activation_checkpointing": str(plan.candidate.parallelism.activation_checkpointing),
        "micro_batch_size": plan.candidate.micro_batch_size,
        "micro_batches": plan.workload.micro_batches,
        "peak_memory_bytes": plan.memory.peak,
        "memory": [asdict(term) for term in plan.memory.terms],
        "step_seconds": plan.time.seconds,
        "time": [asdict(term) for term in plan.time.terms],
        "tokens_per_second_per_rank": plan.time.tokens_per_second_per_gpu,
        "mfu": plan.time.mfu,
        "command": request.command(plan),
    }


def simulated_lines(plans: Sequence[Plan], simulated: Sequence[Sequence[SimulatedRank]]) -> list[str]:
    """Return the estimated and the simulated memory of each row, with the traffic of the fullest rank."""
    title = fit("simulations: bytes of the run's own code on fake tensors, at the first ranks of each kind of stage")
    lines = ["", *title.split("\n")]
    for number, (plan, runs) in enumerate(zip(plans, simulated, strict=True), 1):
        first, *others = simulation_lines(runs, plan.memory.peak)
        lines += [f"row {number}: {first}", *others]
    return lines


def write_drawing(request: PlanRequest, plans: list[Plan]) -> None:
    """Draw row 1, or the row of --why, in the file of --draw. Raises ConfigError if it cannot be written."""
    plan = plans[min(request.options.why or 1, len(plans)) - 1]
    model = request.cfg.model
    name = Path(model.path).name if model.path else str(model.config.get("model_type", "model"))
    picture = picture_of_plan(plan, request.hardware, request.choice.ranks_per_node, f"{name}: {mesh_name(plan)}")
    file = Path(request.options.draw)
    try:
        if file.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if not is_replaceable(file, _MARK):
            raise ConfigError(f"--draw {file}: exists and is no picture of a mesh; move it away, or name another file")
        atomic_write(file, render_mesh(picture))
    except OSError as error:
        raise ConfigError(
            f"--draw {file}: cannot be written: {error.strerror}; name a file in an existing folder"
        ) from error
