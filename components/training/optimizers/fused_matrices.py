"""Matrices that a fused projection consists of: queries, keys and values, or gate and up."""

from __future__ import annotations

from collections.abc import Sequence

from components.models.anatomy import Anatomy

Runs = tuple[range, ...]
"""Indices along one dim, as ascending ranges."""

HALVES = {"gate_up_proj"}
"""Projections with gate and up one after the other."""
QUERIES_KEYS_VALUES = {"qkv_proj", "c_attn", "Wqkv", "W_pack"}
"""Projections with all queries, then all keys, then all values."""
BY_HEAD = {"query_key_value"}
"""Projections with the queries, key and value of one key-value head after the other (GPT-NeoX, BLOOM, Falcon)."""
ALTERNATING = {"gpt_oss"}
"""Model types whose experts alternate between a column of gate and one of up."""


def fused_matrices(name: str, shape: Sequence[int], anatomy: Anatomy, model_type: str) -> tuple[int, list[Runs]] | None:
    """Return the fused dim of a weight, and the indices of each of its matrices along it; None if it is one matrix.

    Args:
        name: Name of the parameter.
        shape: Shape of the full weight: (out, in), (in, out), or either after a dim of experts.
        model_type: Model type of the config.
    """
    components = name.split(".")
    projection = components[-2] if components[-1] == "weight" else components[-1]
    dim = len(shape) - (1 if name in anatomy.transposed else 2)  # of the outputs
    size = shape[dim]
    if projection in HALVES and size % 2 == 0:
        if model_type in ALTERNATING and len(shape) == 3:
            return dim, [tuple(range(i, i + 1) for i in range(first, size, 2)) for first in (0, 1)]
        return dim, [(range(size // 2),), (range(size // 2, size),)]
    widths, kv_heads = anatomy.widths, anatomy.kv_heads
    if widths is None or not kv_heads:
        return None
    sizes = (widths.heads * widths.keys, kv_heads * widths.keys, kv_heads * widths.values)
    if sum(sizes) != size:
        return None
    if projection in QUERIES_KEYS_VALUES:
        starts = (0, sizes[0], sizes[0] + sizes[1])
        return dim, [(range(start, start + width),) for start, width in zip(starts, sizes, strict=True)]
    if projection in BY_HEAD:
        return dim, _by_head(sizes, kv_heads)
    return None


def _by_head(sizes: tuple[int, int, int], kv_heads: int) -> list[Runs]:
    """Return the indices of queries, keys and values that alternate between key-value heads."""
    queries, keys, values = (width // kv_heads for width in sizes)
    group = queries + keys + values
    offsets = ((0, queries), (queries, keys), (queries + keys, values))
    return [tuple(range(head * group + o, head * group + o + n) for head in range(kv_heads)) for o, n in offsets]
