"""Distribution of attention heads and layers over mesh axes: arithmetic that needs no torch."""

from __future__ import annotations

from enum import StrEnum


class AttentionLayout(StrEnum):
    """Distribution of attention heads over the tp axis."""

    sharded = "sharded"
    kv_replicated = "kv_replicated"
    replicated = "replicated"


def attention_layout(heads: int, kv_heads: int, tp: int) -> AttentionLayout:
    """Return how query heads and key/value heads are distributed over `tp` ranks.

    sharded: tp divides both counts. kv_replicated: tp divides the query heads and is a multiple of the kv heads, each
    of which is replicated on tp / kv_heads ranks. replicated: otherwise; every rank computes all heads."""
    if heads % tp == 0 and kv_heads % tp == 0:
        return AttentionLayout.sharded
    if heads % tp == 0 and tp % kv_heads == 0:
        return AttentionLayout.kv_replicated
    return AttentionLayout.replicated


def local_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Return the number of query heads and of kv heads that a tp rank computes."""
    if attention_layout(heads, kv_heads, tp) == AttentionLayout.replicated:
        return heads, kv_heads
    return heads // tp, max(kv_heads // tp, 1)


def ulysses_divides(heads: int, kv_heads: int, cp: int) -> bool:
    """Return whether the heads of a rank can be sharded evenly over cp, with kv heads repeated if they are too few."""
    return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the decoder layers of each pipeline stage, as even as possible, with extra layers on the middle stages.

    The first stage also holds the embedding and the last the LM head, so these two get the smaller share.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    sizes = [base + (stage in middle_first[:extra]) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
