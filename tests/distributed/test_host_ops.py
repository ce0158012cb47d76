"""What the host does in a step does not depend on how many ranks there are: 8 and 16,384, on torch's fake backend."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 (what functional collectives import: once, before ranks are forked)

from scripts.benchmark.host_ops import axes_of, count_step
from tests.harness import run_ranks


def test_a_step_of_16384_ranks_costs_the_host_what_one_of_8_does() -> None:
    """The script does more meshes."""
    mesh = "dp_shard=-1,cp=2,tp=2,sequence_parallel=true"
    few, many = (
        run_ranks(1, lambda _, world=world: count_step(world, axes_of(mesh), "chunked"), init=False, timeout=120)[0]
        for world in (8, 16384)
    )
    assert few["collectives"] > 10
    assert few["by_operator"] == many["by_operator"]
    assert few["lines"] == many["lines"]
