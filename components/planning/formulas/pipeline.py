"""Pipeline schedules: idle time by closed formulas, and a timeline by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from components.config.schema.parallelism import PipelineSchedule


class StageSeconds(NamedTuple):
    """Seconds of a micro-batch on a pp rank, all of its stages together."""

    forward: float
    backward: float


def pipeline_seconds(
    schedule: PipelineSchedule, per_rank: int, micro_batches: int, stages: Sequence[StageSeconds]
) -> tuple[float, str]:
    """Return the seconds of all micro-batches, and the formula."""
    pp = len(stages)
    slowest = max(each.forward + each.backward for each in stages)
    if per_rank == 1:
        others = sum(each.forward + each.backward for each in stages) - slowest
        return micro_batches * slowest + others, f"{micro_batches} x {slowest:.4g} s + {others:.4g} s of other stages"
    mean = sum(each.forward + each.backward for each in stages) / pp
    bubble = (pp - 1) * mean / per_rank
    return micro_batches * slowest + bubble, f"{micro_batches} x {slowest:.4g} s + {pp - 1} x {mean:.4g} s / {per_rank}"
