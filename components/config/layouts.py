"""How heads, layers and micro-batches lie over mesh axes: arithmetic that is checked before torch is imported."""

from __future__ import annotations

from enum import StrEnum

from components.config.schema.parallelism import PipelineSchedule


class AttentionLayout(StrEnum):
    """How attention heads lie over the tp axis."""

    sharded = "sharded"
    kv_replicated = "kv_replicated"
    replicated = "replicated"


def attention_layout(heads: int, kv_heads: int, tp: int) -> AttentionLayout:
    """Return how `heads` query heads and `kv_heads` key/value heads lie over `tp` ranks.

    sharded: tp divides both. kv_replicated: fewer kv heads than ranks, each shared by tp / kv_heads ranks.
    replicated: neither divides, so every rank computes all heads.
    """
    if heads % tp == 0 and kv_heads % tp == 0:
        return AttentionLayout.sharded
    if heads % tp == 0 and tp % kv_heads == 0:
        return AttentionLayout.kv_replicated
    return AttentionLayout.replicated


def local_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Return how many query and kv heads a tp rank computes."""
    if attention_layout(heads, kv_heads, tp) == AttentionLayout.replicated:
        return heads, kv_heads
    return heads // tp, max(kv_heads // tp, 1)


def ulysses_divides(heads: int, kv_heads: int, cp: int) -> bool:
    """Return whether cp ranks can share a rank's heads evenly, kv heads being repeated where there are too few."""
    return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return which decoder layers each pipeline stage has: equal numbers, what is left over to the middle stages.

    The first stage also embeds and the last also projects to the vocabulary, so these two get the smaller share.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    sizes = [base + (stage in middle_first[:extra]) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def micro_batch_rule(schedule: PipelineSchedule, pp: int, micro_batches: int) -> str | None:
    """Return what a schedule demands of the number of micro-batches per step, or None where it is met."""
    if schedule == "1F1B" and micro_batches < pp:
        return f"1F1B needs at least as many micro-batches as stages, {pp}"
    if schedule == "DualPipeV" and micro_batches < 2 * pp:
        return f"DualPipeV needs at least as many micro-batches as stages, {2 * pp}"
    rounds = max(1, micro_batches // pp)
    if str(schedule).startswith("Interleaved") and micro_batches % rounds:
        return f"{schedule} passes {pp} stages in {rounds} rounds and needs a multiple of that many micro-batches"
    return None
