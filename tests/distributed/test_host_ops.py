"""The host work of a step does not depend on the world size: 8 and 16,384 ranks on torch's fake backend."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 (functional collectives import it; do so once, before ranks are forked)

from scripts.benchmark.host_ops import axes_of, count_step
from tests.harness import run_ranks


def test_host_work_of_a_step_is_the_same_for_8_and_16384_ranks() -> None:
    """One mesh; scripts/benchmark/host_ops.py covers more."""
    mesh = "dp_shard=-1,cp=2,tp=2,sequence_parallel=true"
    few, many = (
        run_ranks(1, lambda _, world=world: count_step(world, axes_of(mesh), "chunked"), init=False, timeout=120)[0]
        for world in (8, 16384)
    )
    assert few["collectives"] > 10
    assert few["by_operator"] == many["by_operator"]
    assert few["lines"] == many["lines"]
