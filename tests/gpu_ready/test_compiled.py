"""Layers traced by the compiler on fake CUDA tensors: few graphs, and none after the first step."""

from __future__ import annotations

import pytest

from tests.gpu_ready.conftest import Run
from tests.gpu_ready.matrix import LAYOUTS
from tests.suites import PARITY, select

GRAPHS = {"cp by all_gather": 7}
"""Largest number of graphs of two layers in training, by layout; others: 4, two for each of a first layer, whose input
needs no gradient under adapters, and the others."""


EACH_COMMIT = [("cp by ulysses", "packed"), ("tp with sequence parallelism", "packed"), ("pp", "adapters")]
ALL = [(layout, rows) for layout in LAYOUTS for rows in ("packed", "padded", "adapters")]


@pytest.mark.parametrize(("layout", "rows"), select(ALL, EACH_COMMIT, PARITY))
def test_graphs_are_few_and_complete_after_the_first_step(fake_cuda: Run, layout: str, rows: str) -> None:
    """tp is compiled for packed rows only, because each row length is a graph there."""
    axes, world = LAYOUTS[layout]
    if "tp" in axes and rows == "padded":
        rows = "packed"
    peft = "lora" if rows == "adapters" else "none"
    for rank in {0, world - 1} if "pp" in axes else {0}:
        found = fake_cuda("graphs", axes=axes, world=world, rank=rank, peft=peft, pack=rows != "padded")
        assert 0 < found["graphs"][-1] <= GRAPHS.get(layout, 4), found
        assert found["graphs"][1:] == found["graphs"][:1] * 2
        assert found["with_evaluation"] <= 2 * found["graphs"][-1] + 2
        assert found["breaks"] == (["GatheredAttention.__call__"] if layout == "cp by all_gather" else [])
