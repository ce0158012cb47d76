"""Tables and JSON of scripts/plan.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from components.config.schema.parallelism import AXES, ActivationCheckpointing, Strategy
from components.planning.dry_run.dry_run_result import DryRun
from components.planning.dry_run.played_run import dry_run_lines
from components.planning.formulas.memory_check import GIB, usable_bytes
from components.planning.formulas.ranking import Plan
from components.planning.formulas.term import Term
from scripts._plan.options import PlanRequest

HEADER = ("row", "mesh", "recompute", "micro batch", "memory GiB", "step s", "tokens/s/rank", "MFU", "largest terms")


def table_lines(request: PlanRequest, plans: list[Plan]) -> list[str]:
    """Return the ranked table, and the command of its first row."""
    rows = [HEADER, *(_row(number, plan) for number, plan in enumerate(plans[: request.options.top], 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    left_out = sum(request.left_out.reasons.values())
    return [
        *_summary(request, plans[0]),
        "",
        *lines,
        "",
        f"{left_out:,} other candidates are left out: --left-out prints why; --why ROW prints every term of a row",
        "row 1:",
        f"  {request.command(plans[0])}",
    ]


def why_lines(request: PlanRequest, plans: list[Plan]) -> list[str]:
    """Return every term of a row with its formula and source."""
    number = min(request.options.why, len(plans))
    plan = plans[number - 1]
    lines = [
        *_summary(request, plan),
        "",
        f"row {number}: {mesh_name(plan)}",
        f"  {request.command(plan)}",
        "",
        f"memory of the fullest rank (pp coordinate {plan.memory.stage}) when {plan.memory.moment}: "
        f"{plan.memory.peak / GIB:,.2f} GiB of {usable_bytes(request.hardware) / GIB:,.2f} usable",
        *_terms(plan.memory.terms, GIB, "GiB"),
        "",
        f"time of a step: {plan.time.seconds:,.3f} s",
        *_terms(plan.time.terms, 1e-3, "ms"),
    ]
    if number != request.options.why:
        lines.append(f"row {request.options.why} does not exist; this is the last one")
    return lines


def left_out_lines(request: PlanRequest, plans: list[Plan]) -> list[str]:
    """Return the reasons for leaving candidates out, the most frequent first."""
    reasons = request.left_out.reasons.most_common()
    return [*_summary(request, plans[0]), "", *(f"{count:6,}  {reason}" for reason, count in reasons)]


def as_json(request: PlanRequest, plans: list[Plan], played: Sequence[Sequence[DryRun]]) -> str:
    """Return the rows as JSON: bytes and seconds."""
    rows = [_json_row(request, plan) for plan in plans[: request.options.top]]
    for row, runs in zip(rows, played, strict=False):
        row["dry_run"] = [each.as_json() for each in runs]
    values = {
        "device": request.hardware.name,
        "world": request.choice.world,
        "parameters": plans[0].workload.architecture.parameters,
        "tokens_per_step": plans[0].workload.tokens_per_step,
        "rows": rows,
    }
    return json.dumps(values, indent=1)


def mesh_name(plan: Plan) -> str:
    """Return the axes larger than 1 and what they use: `dp_shard=8 tp=4 sp`."""
    parallelism, mesh = plan.candidate.parallelism, plan.candidate.mesh
    if parallelism.strategy is not Strategy.fsdp2:
        return f"{parallelism.strategy} {mesh.world}" if mesh.world > 1 else str(parallelism.strategy)
    parts = [f"{axis}={mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1] or ["dp_shard=1"]
    if parallelism.sequence_parallel:
        parts.append("sp")
    if mesh.pp > 1:
        parts.append(str(parallelism.pp_schedule))
    return " ".join(parts)


def _summary(request: PlanRequest, plan: Plan) -> list[str]:
    workload, architecture = plan.workload, plan.workload.architecture
    return [
        f"{architecture.parameters / 1e9:,.2f}B parameters, {workload.tokens_per_step:,} tokens per step in rows of "
        f"{workload.seq_len:,}, on {request.choice.world} x {request.hardware.name} "
        f"({request.choice.ranks_per_node} per node)"
    ]


def _row(number: int, plan: Plan) -> tuple[str, ...]:
    policy = plan.candidate.parallelism.activation_checkpointing
    return (
        str(number),
        mesh_name(plan),
        "-" if policy is ActivationCheckpointing.none else str(policy),
        f"{plan.candidate.micro_batch_size} x {plan.workload.micro_batches}",
        f"{plan.memory.peak / GIB:,.1f}",
        f"{plan.time.seconds:,.2f}",
        f"{plan.time.tokens_per_second_per_gpu:,.0f}",
        f"{plan.time.mfu:.0%}",
        _largest(plan.time.terms, plan.time.seconds),
    )


def _largest(terms: Iterable[Term], seconds: float) -> str:
    ordered = sorted(terms, key=lambda each: -each.value)[:3]
    return ", ".join(f"{each.name} {each.value / seconds:.0%}" for each in ordered if each.value / seconds >= 0.01)


def _terms(terms: Sequence[Term], unit: float, name: str) -> list[str]:
    width = max(len(each.name) for each in terms)
    lines = []
    for each in terms:
        source = f"  [{each.source}]" if each.source else ""
        lines.append(f"  {each.name:<{width}}  {each.value / unit:>10,.2f} {name}  {each.formula}{source}")
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
        "memory": [asdict(each) for each in plan.memory.terms],
        "step_seconds": plan.time.seconds,
        "time": [asdict(each) for each in plan.time.terms],
        "tokens_per_second_per_rank": plan.time.tokens_per_second_per_gpu,
        "mfu": plan.time.mfu,
        "command": request.command(plan),
    }


def played_lines(plans: Sequence[Plan], played: Sequence[Sequence[DryRun]]) -> list[str]:
    """Return the estimated and the played memory of each row, with the traffic of the fullest rank."""
    lines = ["", "dry runs: bytes of the run's own code on fake tensors, maximum over the played ranks"]
    for number, (plan, runs) in enumerate(zip(plans, played, strict=True), 1):
        first, *others = dry_run_lines(runs, plan.memory.peak)
        lines += [f"row {number}: {first}", *others]
    return lines
