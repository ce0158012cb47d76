"""Pipeline schedules: order of each rank, idle time by closed formulas, and the timeline of a step by simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from components.config.schema.parallelism import (
    ONE_F_ONE_B,
    SINGLE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    PipelineSchedule,
)


class WorkKind(StrEnum):
    """forward; backward: of inputs and weights; input_gradient, weight_gradient: the two parts of a split backward."""

    forward = "F"
    backward = "B"
    input_gradient = "I"
    weight_gradient = "W"


class StageWork(NamedTuple):
    """One micro-batch's work of a stage."""

    kind: WorkKind
    stage: int
    micro_batch: int


F, B, I, W = WorkKind  # noqa: E741 (the names of the literature)


class StageSeconds(NamedTuple):
    """Seconds of a micro-batch in a pipeline stage."""

    forward: float
    backward: float
    """With recomputation and weight gradients."""
    weights: float
    """Part of the backward that computes weight gradients."""

    def of(self, kind: WorkKind) -> float:
        """Return the seconds of a kind of work."""
        seconds = {
            WorkKind.forward: self.forward,
            WorkKind.backward: self.backward,
            WorkKind.input_gradient: self.backward - self.weights,
            WorkKind.weight_gradient: self.weights,
        }
        return seconds[kind]


class Interval(NamedTuple):
    """Time in which a pp rank computes one micro-batch's work of a stage."""

    rank: int
    start: float
    seconds: float
    kind: WorkKind
    stage: int
    micro_batch: int


def pipeline_seconds(
    schedule: PipelineSchedule, stage_ranks: Sequence[int], stages: Sequence[StageSeconds], micro_batches: int
) -> tuple[float, str]:
    """Return the seconds of all micro-batches without sends, and their formula. Equal to the end of `timeline` for
    stages of equal length and at least pp micro-batches; close to it otherwise.

    One stage per rank: the slowest rank computes without interruption, after and before the others' one micro-batch.
    v stages per rank: it waits (pp - 1) / v times for a forward and backward, less the weight gradients that a split
    backward computes meanwhile; a round of fewer than pp micro-batches leaves it waiting in each of v - 1 rounds.
    """
    totals = rank_seconds(stage_ranks, stages)
    pp, per_rank = len(totals), len(stages) // len(totals)
    busy = [total.forward + total.backward for total in totals]
    slowest, everyone = max(busy), sum(busy)
    work = f"{micro_batches} x {slowest:.4g} s"
    if per_rank == 1:
        others = everyone - slowest
        return micro_batches * slowest + others, f"{work} + {others:.4g} s of the other ranks"
    hop = everyone / pp
    if schedule in SPLIT_BACKWARD:
        hop = max(0.0, hop - 2 * sum(total.weights for total in totals) / pp)
    missing = max(0, pp - micro_batches) * everyone / pp
    waits = ((pp - 1) * hop + (per_rank - 1) * missing) / per_rank
    formula = f"{work} + ({pp - 1} x {hop:.4g} s + {per_rank - 1} x {missing:.4g} s) / {per_rank} stages"
    return micro_batches * slowest + waits, formula


def send_hops(schedule: PipelineSchedule, pp: int, per_rank: int, micro_batches: int) -> float:
    """Return the number of point-to-point sends on a step's critical path. Under 1F1B each pp micro-batches wait for
    2 (pp - 1); other schedules have something else to compute, except at the start and end."""
    if schedule is ONE_F_ONE_B:
        return 2 * (pp - 1) * (1 + micro_batches / pp) - 2
    return 2 * (pp * per_rank - 1)


def rank_seconds(stage_ranks: Sequence[int], stages: Sequence[StageSeconds]) -> list[StageSeconds]:
    """Return the seconds of a micro-batch on each pp rank, all of its stages together."""
    totals = [(0.0, 0.0, 0.0)] * (max(stage_ranks) + 1)
    for rank, stage in zip(stage_ranks, stages, strict=True):
        forward, backward, weights = totals[rank]
        totals[rank] = (forward + stage.forward, backward + stage.backward, weights + stage.weights)
    return [StageSeconds(*total) for total in totals]


def timeline(
    schedule: PipelineSchedule,
    stage_ranks: Sequence[int],
    stages: Sequence[StageSeconds],
    micro_batches: int,
    send_seconds: float = 0.0,
) -> list[Interval]:
    """Return the intervals of a step, by simulation: each rank computes in its order, as soon as inputs have arrived.

    Args:
        stage_ranks: pp rank of each stage.
        stages: Seconds of each stage.
        send_seconds: Seconds from the end of a stage's work to its arrival on the rank of the next stage.
    """
    pp = max(stage_ranks) + 1
    orders = _schedule_order(schedule, pp, len(stages) // pp, micro_batches)
    positions, free = [0] * pp, [0.0] * pp
    ends: dict[StageWork, float] = {}
    intervals: list[Interval] = []
    while len(intervals) < sum(map(len, orders)):
        before = len(intervals)
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                work = order[positions[rank]]
                arrived = _arrival(work, stage_ranks, ends, send_seconds)
                if arrived is None:
                    break
                start, seconds = max(free[rank], arrived), stages[work.stage].of(work.kind)
                free[rank] = ends[work] = start + seconds
                intervals.append(Interval(rank, start, seconds, work.kind, work.stage, work.micro_batch))
                positions[rank] += 1
        if len(intervals) == before:
            raise ValueError(f"{schedule} with {micro_batches} micro-batches on {pp} ranks waits for itself")
    return intervals


def _arrival(
    work: StageWork, stage_ranks: Sequence[int], ends: dict[StageWork, float], send_seconds: float
) -> float | None:
    """Return when the input of `work` is on its rank; None: it is not computed yet."""
    step = -1 if work.kind is WorkKind.forward else 1
    source = work.stage + step
    if work.kind is WorkKind.weight_gradient or not 0 <= source < len(stage_ranks):
        return 0.0  # the rank's own earlier work
    kinds = (work.kind,) if work.kind is WorkKind.forward else (WorkKind.backward, WorkKind.input_gradient)
    for kind in kinds:
        end = ends.get(StageWork(kind, source, work.micro_batch))
        if end is not None:
            return end + (0.0 if stage_ranks[source] == stage_ranks[work.stage] else send_seconds)
    return None


def _schedule_order(schedule: PipelineSchedule, pp: int, per_rank: int, micro_batches: int) -> list[list[StageWork]]:
    """Return what each pp rank computes, in order.

    Args:
        per_rank: Stages per rank: 1 for GPipe and 1F1B, 2 for ZBVZeroBubble and DualPipeV.
        micro_batches: As many as the schedule allows: see components.config.mesh_rules.
    """
    ranks = range(pp)
    if schedule in SINGLE_STAGE:
        in_flight = [micro_batches if schedule == "GPipe" else pp - rank for rank in ranks]
        return [_one_stage(rank, micro_batches, min(micro_batches, in_flight[rank])) for rank in ranks]
    if schedule in V_SHAPED:
        order = _zbv if schedule == "ZBVZeroBubble" else _dual_pipe_v
        return [order(rank, pp, micro_batches) for rank in ranks]
    if schedule == "LoopedBFS":
        return [_breadth_first(list(range(rank, pp * per_rank, pp)), micro_batches) for rank in ranks]
    split = schedule == "InterleavedZeroBubble"
    return [_interleaved(rank, pp, per_rank, micro_batches, split=split) for rank in ranks]


def _one_stage(stage: int, micro_batches: int, in_flight: int) -> list[StageWork]:
    """Return forwards of `in_flight` micro-batches, then a backward and a forward alternately, then backwards."""
    order = [StageWork(F, stage, each) for each in range(in_flight)]
    for each in range(micro_batches):
        order.append(StageWork(B, stage, each))
        if in_flight + each < micro_batches:
            order.append(StageWork(F, stage, in_flight + each))
    return order


def _breadth_first(stages: list[int], micro_batches: int) -> list[StageWork]:
    """Return all micro-batches stage by stage; backwards in reverse (Lamy-Poirier 2023)."""
    order = [StageWork(F, stage, each) for stage in stages for each in range(micro_batches)]
    return order + [StageWork(B, stage, each) for stage in stages[::-1] for each in reversed(range(micro_batches))]


def _interleaved(rank: int, pp: int, per_rank: int, micro_batches: int, *, split: bool) -> list[StageWork]:
    """Return the order of Narayanan et al. (2021): rounds of about pp micro-batches, each through all local stages.

    Args:
        split: Compute weight gradients `rank` operations after the input gradients (ZB1P of Qi et al. 2023).
    """
    round_size = micro_batches // max(1, micro_batches // pp)
    number = per_rank * micro_batches
    warmup = min(number, (per_rank - 1) * round_size + (1 if split else 2) * (pp - 1 - rank))
    forwards = _by_rounds(range(per_rank), round_size, number)
    backwards = list(_by_rounds(range(per_rank)[::-1], round_size, number))
    order: list[StageWork] = []
    for step, (stage, each) in enumerate(forwards):
        order.append(StageWork(F, stage * pp + rank, each))
        if step >= warmup:
            order += _interleaved_backward(rank, pp, backwards, step - warmup, split=split)
    for step in range(number - warmup, number):
        order += _interleaved_backward(rank, pp, backwards, step, split=split)
    pending = backwards[max(0, number - rank) :] if split else []
    return order + [StageWork(W, stage * pp + rank, each) for stage, each in pending]


def _interleaved_backward(
    rank: int, pp: int, backwards: list[tuple[int, int]], step: int, *, split: bool
) -> Iterator[StageWork]:
    stage, each = backwards[step]
    yield StageWork(I if split else B, stage * pp + rank, each)
    if split and step >= rank:
        stage, each = backwards[step - rank]
        yield StageWork(W, stage * pp + rank, each)


def _by_rounds(stages: range, round_size: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield `number` pairs of a local stage and a micro-batch: each stage takes `round_size` micro-batches in turn."""
    counts: Counter[int] = Counter()
    for step in range(number):
        stage = stages[step // round_size % len(stages)]
        yield stage, counts[stage]
        counts[stage] += 1


class _Recorder:
    """Order of a rank whose operations count micro-batches up, for each stage and kind of work."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.order: list[StageWork] = []
        self.pending: list[StageWork] = []
        """Weight gradients that are not computed yet."""
        self._stages = stages
        self._counts: Counter[tuple[int, bool]] = Counter()

    def add(self, kind: WorkKind, local: int) -> None:
        """Append the next micro-batch's work of a local stage, 0 or 1."""
        key = (local, kind is F)
        work = StageWork(kind, self._stages[local], self._counts[key])
        self._counts[key] += 1
        self.order.append(work)
        if kind is I:
            self.pending.append(work._replace(kind=W))

    def add_weights(self, local: int | None = None) -> None:
        """Append the oldest pending weight gradient, of a local stage or of any, if there is one."""
        stage = None if local is None else self._stages[local]
        work = next((each for each in self.pending if stage in (None, each.stage)), None)
        if work is not None:
            self.pending.remove(work)
            self.order.append(work)

    def count(self, local: int) -> int:
        """Return the number of forwards of a local stage."""
        return self._counts[local, True]


def _zbv(rank: int, pp: int, micro_batches: int) -> list[StageWork]:
    """Return the order of ZBV (Qi et al. 2024); stages 0 to pp - 1 go down the ranks, the others up."""
    # The order needs this many micro-batches to fill the pipeline; those that the run does not have are left out.
    number = max(2 * pp - 1, micro_batches)
    record = _Recorder((rank, 2 * pp - 1 - rank))
    for _ in range(2 * (pp - rank) - 1):
        record.add(F, 0)
    for _ in range(rank):
        record.add(F, 1)
        record.add(F, 0)
    for _ in range(pp - rank):
        for kind in (F, I):
            record.add(kind, 1)
        record.add_weights()
    # The steady state ends when the rank's later stage has caught up with its earlier one.
    while record.count(1) < record.count(0) or record.count(0) < number:
        if record.count(0) < number:
            record.add(F, 0)
        record.add(I, 0)
        record.add_weights()
        for kind in (F, I):
            record.add(kind, 1)
        record.add_weights()
    for _ in range(rank):
        record.add(I, 0)
        record.add(I, 1)
    for _ in range(pp - rank):
        record.add(I, 0)
        record.add_weights(0)
    for local in (1, 0):
        for _ in range(number):
            record.add_weights(local)
    return [each for each in record.order if each.micro_batch < micro_batches]


def _dual_pipe_v(rank: int, pp: int, micro_batches: int) -> list[StageWork]:
    """Return the order of DualPipeV (DeepSeek 2025), whose forwards and backwards do not overlap here."""
    record = _Recorder((rank, 2 * pp - 1 - rank))
    below = pp - rank - 1
    # Ranks below receive their first input later, so earlier ranks run ahead by two forwards per rank below.
    for _ in range(2 * below):
        record.add(F, 0)
    for _ in range(rank + 1):
        record.add(F, 0)
        record.add(F, 1)
    for _ in range(below):
        record.add(I, 1)
        record.add_weights()
        record.add(F, 1)
    for _ in range(micro_batches - 2 * pp + rank + 1):
        for kind, local in ((F, 0), (B, 1), (F, 1), (B, 0)):
            record.add(kind, local)
    for _ in range(below):
        for kind, local in ((B, 1), (F, 1), (B, 0)):
            record.add(kind, local)
    # Weight gradients are delayed from the middle of this phase on: they fill the wait for the last input gradients.
    half, odd = (rank + 1) // 2, rank % 2
    for step in range(rank + 1):
        record.add(I if step > half or (step == half and odd) else B, 1)
        record.add(I if step >= half else B, 0)
    for _ in range(below):
        record.add_weights()
        record.add(I, 0)
    for _ in range(rank + 1):
        record.add_weights()
    return record.order
