"""Each lever on each layout: no host sync, the attention kernel that the banner reports, no matrix of all token pairs,
and collectives as planned. CI runs the riskiest pairs, `make parity PART=gpu_ready` all of them."""

from __future__ import annotations

import os

import pytest

from tests.gpu_ready.conftest import Run
from tests.gpu_ready.matrix import ATTENTION, PAIRS, arguments, per_layer, ranks
from tests.optional import need_torchao

ALL = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
RISKY = [
    ("autocast", "cp by all_gather"), ("packed", "hsdp"), ("LoRA", "tp with sequence parallelism"),
    ("QLoRA", "dp_shard"), ("selective recompute", "tp"), ("full recompute", "pp"), ("experts", "ep"),
]  # fmt: skip
SYNCS = {("experts", "ep"): "expert.py reads the token counts once per layer; on fake tensors it assumes equal ones"}
"""Pairs whose step waits for the device, where and why."""


@pytest.mark.parametrize(("lever", "layout"), PAIRS if ALL else RISKY)
def test_step_neither_waits_nor_holds_all_token_pairs(fake_cuda: Run, lever: str, layout: str) -> None:
    """Tensors on two devices in one operator would raise an error."""
    if lever == "adamw8bit":
        need_torchao()
    for rank in ranks(layout):
        record = fake_cuda("step", **arguments(lever, layout), rank=rank)
        assert record["waits"] == {}
        assert record["evaluation_waits"] == {}
        assert record["devices"] == ["cuda"]
        assert record["masks"] == {}
        assert record["square"] == {}
        kernels = [each for each in ATTENTION if each in record["operators"]]
        assert len(kernels) == 1
        assert (
            f"observed as torch's {kernels[0].removeprefix('_scaled_dot_product_').removeprefix('_')} "
            in (record["reported"])
        )


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


@pytest.mark.parametrize("layout", PLANNED if ALL else ["tp with sequence parallelism"])
def test_a_layer_sends_what_is_planned(fake_cuda: Run, layout: str) -> None:
    found = per_layer(fake_cuda, "packed", layout)
    assert {kind: number for kind, number in found.items() if kind not in ("launches", "MB")} == PLANNED[layout]


def test_a_layer_with_sharded_experts_sends_what_is_planned(fake_cuda: Run) -> None:
    """The number of tokens of each expert, the tokens there and back, and the reverse in the backward. Experts and the
    rest of a layer are FSDP2 units of their own."""
    found = per_layer(fake_cuda, "experts", "ep")
    sent = {kind: number for kind, number in found.items() if kind not in ("launches", "MB")}
    assert sent == {"all-gathers": 4, "reduce-scatters": 1, "all-to-alls": 5}
