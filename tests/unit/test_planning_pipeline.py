"""Pipeline schedules of the planner: their orders are torch's, and their idle time is that of a simulated step."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from components.config.schema.parallelism import SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, ParallelismConfig
from components.config.schema.parallelism import PipelineSchedule as Schedule
from components.planning.formulas.pipeline import (
    Interval,
    StageSeconds,
    StageWork,
    WorkKind,
    _schedule_order,
    pipeline_seconds,
    send_hops,
    timeline,
)

SEVERAL_STAGES = [each for each in Schedule if each not in SINGLE_STAGE]
TORCH_KINDS = {
    torch_schedules.FORWARD: WorkKind.forward,
    torch_schedules.FULL_BACKWARD: WorkKind.backward,
    torch_schedules.BACKWARD_INPUT: WorkKind.input_gradient,
    torch_schedules.BACKWARD_WEIGHT: WorkKind.weight_gradient,
}


def allowed(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    """Return whether torch accepts the number of micro-batches."""
    if schedule == "DualPipeV":
        return micro_batches >= 2 * pp
    if schedule == "1F1B":
        return micro_batches >= pp
    return not schedule.startswith("Interleaved") or micro_batches % max(1, micro_batches // pp) == 0


def torch_order(schedule: Schedule, pp: int, per_rank: int, micro_batches: int) -> list[list[StageWork]]:
    """Return the order of a schedule of torch, which computes it in the constructor, from its group's ranks."""
    instance = object.__new__(torch_schedules.get_schedule_class(str(schedule)))
    rounds = max(1, micro_batches // pp)
    values = {
        "pp_group_size": pp, "n_local_stages": per_rank, "_n_microbatches": micro_batches, "number_of_rounds": rounds,
        "_num_stages": pp * per_rank, "num_stages": pp * per_rank, "microbatches_per_round": micro_batches // rounds,
        "_stages": [None] * per_rank,
    }  # fmt: skip
    for name, value in values.items():
        setattr(instance, name, value)
    orders = []
    for rank in range(pp):
        instance.rank = rank
        actions = [each for each in instance._calculate_single_rank_operations(rank) if each is not None]
        flat = [part for each in actions for part in (each.sub_actions or (each,))]
        orders.append(
            [StageWork(TORCH_KINDS[each.computation_type], each.stage_index, each.microbatch_index) for each in flat]
        )
    return orders


def run(schedule: Schedule, pp: int, micro_batches: int, head: float = 1.0, send: float = 0.0) -> list[Interval]:
    """Return the timeline of stages with forward 1 and backward 2 per rank, of which 1 for the weights."""
    return timeline(schedule, ranks(schedule, pp), stages(schedule, pp, head), micro_batches, send)


def ranks(schedule: Schedule, pp: int) -> list[int]:
    """Return the rank of each stage."""
    return ParallelismConfig(pp=pp, pp_schedule=schedule).stage_ranks(pp)


def stages(schedule: Schedule, pp: int, head: float = 1.0) -> list[StageSeconds]:
    """Return stages of equal length, but for the last, which takes `head` times as long."""
    per_rank = len(ranks(schedule, pp)) // pp
    one = StageSeconds(1 / per_rank, 2 / per_rank, 1 / per_rank)
    return [*[one] * (pp * per_rank - 1), StageSeconds(*(head * value for value in one))]


def end(intervals: list[Interval]) -> float:
    """Return the time of the last interval's end."""
    return max(each.start + each.seconds for each in intervals)


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_orders_are_those_of_torch(schedule: Schedule, pp: int) -> None:
    compared = 0
    for per_rank in (2,) if schedule in V_SHAPED else (2, 3, 4):
        for micro_batches in (1, 2, 3, 4, 6, 8, 16, 24):
            if allowed(schedule, pp, micro_batches):
                expected = torch_order(schedule, pp, per_rank, micro_batches)
                assert _schedule_order(schedule, pp, per_rank, micro_batches) == expected, (per_rank, micro_batches)
                compared += 1
    assert compared >= 2


def test_gpipe_computes_all_forwards_first_and_1f1b_alternates() -> None:
    text = {
        schedule: ["".join(work.kind for work in order) for order in _schedule_order(Schedule(schedule), 3, 1, 4)]
        for schedule in SINGLE_STAGE
    }
    assert text == {"GPipe": ["FFFFBBBB"] * 3, "1F1B": ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]}


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 12), (8, 16), (8, 64)])
def test_a_timeline_computes_everything_once_in_a_possible_order(
    schedule: Schedule, pp: int, micro_batches: int
) -> None:
    intervals = run(schedule, pp, micro_batches, send=0.25)
    place = ranks(schedule, pp)
    number = len(place) * micro_batches
    kinds = Counter(each.kind for each in intervals)

    assert kinds[WorkKind.forward] == number
    assert kinds[WorkKind.backward] + kinds[WorkKind.input_gradient] == number
    assert kinds[WorkKind.input_gradient] == kinds[WorkKind.weight_gradient]
    assert bool(kinds[WorkKind.weight_gradient]) == (schedule in SPLIT_BACKWARD)
    for rank in range(pp):
        own = sorted(each for each in intervals if each.rank == rank)
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(own))
    weights = WorkKind.weight_gradient
    work = [each for each in intervals if each.kind is not weights]
    ends = {(each.kind == "F", each.stage, each.micro_batch): each.start + each.seconds for each in work}
    for each in intervals:
        forward = each.kind is WorkKind.forward
        inputs = [(False, each.stage)] if each.kind is weights else [(True, each.stage)] * (not forward)
        neighbor = each.stage + (-1 if forward else 1)
        if each.kind is not weights and 0 <= neighbor < len(place):
            inputs.append((forward, neighbor))
        for kind, stage in inputs:
            delay = 0.25 if place[stage] != place[each.stage] else 0.0
            assert each.start >= ends[kind, stage, each.micro_batch] + delay - 1e-9


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubbles_are_those_of_the_literature(pp: int, micro_batches: int) -> None:
    """In units of a rank's forward 1, input gradient 1 and weight gradient 1 of a micro-batch, idle time per step."""
    idle = {schedule: end(run(schedule, pp, micro_batches)) - 3 * micro_batches for schedule in Schedule}
    assert idle == pytest.approx(
        {
            Schedule("GPipe"): 3 * (pp - 1),  # Huang et al. 2019
            Schedule("1F1B"): 3 * (pp - 1),  # Narayanan et al. 2019
            Schedule("Interleaved1F1B"): 3 * (pp - 1) / 2,  # Narayanan et al. 2021: divided by the stages per rank
            Schedule("LoopedBFS"): 3 * (pp - 1) / 2,
            Schedule("InterleavedZeroBubble"): (pp - 1) / 2,  # Qi et al. 2023: F + I - W, divided likewise
            Schedule("ZBVZeroBubble"): (pp - 1) / 2,
            Schedule("DualPipeV"): (pp - 1) / 2,
        }
    )


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("head", [1.0, 1.5])
def test_the_closed_formula_is_close_to_the_simulation(schedule: Schedule, head: float) -> None:
    for pp, micro_batches in ((2, 4), (4, 4), (4, 8), (8, 16), (8, 64), (16, 32)):
        if not allowed(schedule, pp, micro_batches):
            continue
        seconds, formula = pipeline_seconds(schedule, ranks(schedule, pp), stages(schedule, pp, head), micro_batches)
        simulated = end(run(schedule, pp, micro_batches, head))
        tolerance = 1e-9 if schedule in SINGLE_STAGE else 0.11
        assert seconds == pytest.approx(simulated, rel=tolerance), (pp, micro_batches, formula)


def test_fewer_micro_batches_than_ranks_leave_rounds_idle() -> None:
    for schedule in ("Interleaved1F1B", "LoopedBFS"):
        seconds, _ = pipeline_seconds(
            Schedule(schedule), ranks(Schedule(schedule), 8), stages(Schedule(schedule), 8), 4
        )
        assert seconds == pytest.approx(end(run(Schedule(schedule), 8, 4)))


@pytest.mark.parametrize("schedule", Schedule)
def test_sends_prolong_a_step_as_often_as_in_the_simulation(schedule: Schedule) -> None:
    for pp, micro_batches in ((4, 8), (4, 16), (8, 16), (8, 32)):
        simulated = (end(run(schedule, pp, micro_batches, send=0.01)) - end(run(schedule, pp, micro_batches))) / 0.01
        per_rank = len(ranks(schedule, pp)) // pp
        tolerance = 0.25 if schedule in SPLIT_BACKWARD else 1e-6
        if schedule == "LoopedBFS":
            assert simulated <= send_hops(schedule, pp, per_rank, micro_batches)
        else:
            assert send_hops(schedule, pp, per_rank, micro_batches) == pytest.approx(simulated, rel=tolerance)
