"""Each lever on each layout: no host sync, the attention kernel that the banner reports, no matrix of all token pairs,
memory and collectives as planned.

CI runs the riskiest pairs, `make parity PART=gpu_ready` all of them. The latter also compares the launches and bytes of
a layer with counts.json, which may only go down, and writes what it found to outputs/gpu_ready/counts.jsonl, from which
`python -m tests.gpu_ready.table` makes both.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from components.torch_kernels import has_grouped_queries
from tests.gpu_ready.conftest import Run
from tests.gpu_ready.matrix import (
    ATTENTION,
    LEVERS,
    PAIRS,
    arguments,
    difference,
    peak_tolerance,
    per_layer,
    planned_memory,
    ranks,
)
from tests.gpu_ready.table import COUNTS, FOUND, recorded
from tests.optional import SHARDS_BYTES, need_torchao
from tests.suites import PARITY

RISKY = [
    ("autocast", "cp by all_gather"), ("packed", "hsdp"), ("LoRA", "tp with sequence parallelism"),
    ("QLoRA", "dp_shard"), ("selective recompute", "tp"), ("full recompute", "pp"), ("experts", "ep"),
    ("experts, autocast", "single"),
]  # fmt: skip


def supported(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs that the installed torch can run."""
    return [pair for pair in pairs if SHARDS_BYTES or pair[0] != "QLoRA" or pair[1] == "single"]


@pytest.mark.parametrize(("lever", "layout"), supported(PAIRS if PARITY else RISKY))
def test_step_neither_waits_nor_holds_all_token_pairs(fake_cuda: Run, lever: str, layout: str) -> None:
    """Tensors on two devices in one operator would raise an error."""
    if lever == "adamw8bit":
        need_torchao()
    longer = [fake_cuda("step", **arguments(lever, layout), rank=rank) for rank in ranks(layout)]
    found = {}
    if PARITY:
        shorter = fake_cuda("step", **arguments(lever, layout, 1), evaluate=False)
        found = difference(shorter, longer[0])
    peaks = [[rank, record["peak"]] for rank, record in zip(ranks(layout), longer, strict=True)]
    if has_grouped_queries():  # with repeated keys, counts differ from those that are recorded
        _write({"lever": lever, "layout": layout, **found, "waits": longer[0]["waits"], "peaks": peaks})
    for rank, record in zip(ranks(layout), longer, strict=True):
        _check_step(record)
        assert record["evaluation_reads"] == (2 if "objective" in LEVERS[lever] else 1)  # once for all batches
        planned = planned_memory(lever, layout, rank)
        assert planned.peak == pytest.approx(record["peak"], rel=peak_tolerance(lever, layout)), planned
    limit = recorded(COUNTS).get((lever, layout))
    if found and limit is not None and has_grouped_queries():
        assert found["launches"] <= limit["launches"]
        assert found["GB"] <= 1.001 * limit["GB"]


def _check_step(record: dict[str, Any]) -> None:
    assert record["waits"] == {}
    assert record["evaluation_waits"] == {}
    assert record["devices"] == ["cuda"]
    assert record["masks"] == {}
    assert record["square"] == {}
    kernels = [each for each in ATTENTION if each in record["operators"]]
    assert len(kernels) == 1
    kernel = kernels[0].removeprefix("_scaled_dot_product_").removeprefix("_")
    assert f"observed as torch's {kernel} " in record["reported"]


def _write(row: dict[str, Any]) -> None:
    """Append a row to outputs/gpu_ready/counts.jsonl."""
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    with FOUND.open("a") as file:
        file.write(json.dumps(row) + "\n")


PLANNED: dict[str, dict[str, float]] = {
    "single": {},
    "dp_shard": {"all-gathers": 2, "reduce-scatters": 0.5},
    "hsdp": {"all-gathers": 2, "reduce-scatters": 0.5, "all-reduces": 0.5},
    "tp": {"all-gathers": 2, "reduce-scatters": 0.5, "all-reduces": 4},
    "tp with sequence parallelism": {"all-gathers": 6, "reduce-scatters": 4.5, "all-reduces": 1},
    "cp by ulysses": {"all-gathers": 2, "reduce-scatters": 0.5, "all-to-alls": 4},
    "pp": {"all-gathers": 0.5, "reduce-scatters": 0.5},
}
"""Collectives of a layer in a micro-batch of two. FSDP2 gathers each layer in the forward and in the backward, under
pp once per step, and reduces gradients once per step. tp: two each way, and with sequence parallelism the gradients of
two norms once per step. cp: queries, keys and values there, outputs back."""


@pytest.mark.parametrize("layout", PLANNED if PARITY else ["tp with sequence parallelism"])
def test_a_layer_sends_what_is_planned(fake_cuda: Run, layout: str) -> None:
    assert per_layer(fake_cuda, "packed", layout)["collectives"] == PLANNED[layout]


def test_layers_with_adapters_share_the_sum_of_their_input_gradients_under_tp(fake_cuda: Run) -> None:
    """As layers without adapters: one for queries, keys and values, one for gate and up. Those of the step's seven
    replicated factors are 3.5 per micro-batch."""
    assert per_layer(fake_cuda, "LoRA", "tp")["collectives"]["all-reduces"] == 4 + 3.5


def test_a_layer_with_sharded_experts_sends_what_is_planned(fake_cuda: Run) -> None:
    """The number of tokens of each expert, the tokens there and back, and the reverse in the backward. Experts and the
    rest of a layer are FSDP2 units of their own."""
    sent = per_layer(fake_cuda, "experts", "ep")["collectives"]
    assert sent == {"all-gathers": 4, "reduce-scatters": 1, "all-to-alls": 5}
