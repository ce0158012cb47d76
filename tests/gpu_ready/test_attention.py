"""The attention kernel that runs on a GPU, and whether the banner reports it."""

from __future__ import annotations

from typing import Any

import pytest

from components.torch_kernels import has_grouped_queries
from tests.gpu_ready.conftest import Run
from tests.suites import PARITY, select

LAYERS, HEADS, KEY_HEADS = 2, 4, 2
MIXED: dict[str, Any] = {"dtype": "float32", "compute_dtype": "bfloat16"}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "single": ({"strategy": "single"}, 1),
    "dp_shard": ({"dp_shard": 2}, 2),
    "tp": ({"tp": 2}, 2),
    "cp by ulysses": ({"cp": 2}, 2),
    "pp": ({"pp": 2}, 2),
}


@pytest.mark.parametrize("layout", select(LAYOUTS, ["cp by ulysses"], PARITY))
def test_packed_rows_in_mixed_precision_use_varlen_without_mask(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    record = fake_cuda("step", axes=axes, world=world, model=MIXED, pack=True)
    layers = LAYERS // axes.get("pp", 1)
    assert record["masks"] == {}
    assert record["operators"].get("_varlen_attn") == layers * record["micro_batches"]
    assert record["waits"] == {}
    assert "varlen_attn" in record["reported"]
    exchanges = 4 if "ulysses" in layout else 0  # queries, keys and values; the output; forward and backward
    assert record["operators"].get("all_to_all_single", 0) == exchanges * layers * record["micro_batches"]
    # The kernel's grid covers the longest document only: samples have at most 30 tokens, rows 48.
    tp = axes.get("tp", 1) * axes.get("cp", 1)
    assert record["key_heads"] == [(KEY_HEADS if has_grouped_queries() else HEADS) // tp]
    assert {longest for each in record["longest"] for longest in each} <= {16, 32}


@pytest.mark.parametrize("pack", [False, True] if PARITY else [True])
def test_gathered_keys_use_varlen_up_to_the_end_of_each_chunk(fake_cuda: Run, pack: bool) -> None:
    """Rank 0 of 2 holds the first and the last of four chunks: no mask, and no keys beyond the causal triangle.

    One call per chunk and group of heads in the forward, and none in the backward, under selective recompute too.
    """
    axes = {"cp": 2, "cp_attention": "all_gather", "activation_checkpointing": "selective"}
    record = fake_cuda("step", axes=axes, world=2, model=MIXED, pack=pack)
    assert record["masks"] == {}
    assert record["waits"] == {}
    assert "varlen_attn for heads" in record["reported"]
    groups, chunks = 2, 2
    calls = LAYERS * record["micro_batches"] * groups * chunks
    assert record["operators"]["_varlen_attn"] == record["operators"]["_varlen_attn_backward"] == calls
    assert not any("scaled_dot_product" in name for name in record["operators"])
    for (early_queries, early_keys), (late_queries, late_keys) in zip(
        record["longest"][::2], record["longest"][1::2], strict=True
    ):
        assert early_queries == early_keys == late_queries
        assert late_keys == 4 * late_queries or (pack and late_keys <= 32)  # documents have at most 30 tokens
    assert record["key_heads"] == [(KEY_HEADS if has_grouped_queries() else HEADS) // groups]


def test_sdpa_flash_runs_packed_rows_with_the_varlen_kernel(fake_cuda: Run) -> None:
    record = fake_cuda("step", axes={"strategy": "single"}, model={**MIXED, "attention": "sdpa_flash"}, pack=True)
    assert record["operators"]["_varlen_attn"] == LAYERS * record["micro_batches"]


@pytest.mark.parametrize(
    ("model", "axes", "kernel", "reason"),
    [
        (MIXED, {"strategy": "single"}, "flash_attention", "heads of 16 in bfloat16 on cuda"),
        ({**MIXED, "compute_dtype": "float32"}, {"strategy": "single"}, "math", "heads of 16 in float32"),
        ({**MIXED, "compute_dtype": "float32"}, {"dp_shard": 2}, "efficient_attention", "mask for documents"),
        ({**MIXED, "compute_dtype": "float32"}, {"cp": 2, "cp_attention": "all_gather"}, "efficient_attention",
         "mask for the cp shards of a row"),
    ],
)  # fmt: skip
def test_banner_reports_the_attention_kernel_of_the_step(
    fake_cuda: Run, model: dict[str, Any], axes: dict[str, Any], kernel: str, reason: str
) -> None:
    world = axes.get("dp_shard", 1) * axes.get("cp", 1)
    record = fake_cuda("step", axes=axes, world=world, model=model, pack="documents" in reason)
    kernels = {name for name in record["operators"] if "scaled_dot_product" in name and "backward" not in name}
    assert kernels == ({f"_scaled_dot_product_{kernel}"} if kernel != "math" else set())
    assert kernel in record["reported"]
    assert reason in record["reported"]
    assert bool(record["masks"]) == ("mask" in reason)


def test_packed_latent_attention_uses_a_mask_and_reports_it(fake_cuda: Run) -> None:
    """The varlen kernel requires equal head dims of queries and values; DeepSeek's latent attention has two sizes."""
    latent = {
        "model_type": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2,
    }  # fmt: skip
    record = fake_cuda("step", axes={"strategy": "single"}, model={**MIXED, "config": latent}, pack=True)
    assert "_varlen_attn" not in record["operators"]
    assert record["reported"].endswith("for heads of 16 in bfloat16 on cuda with a mask for documents")
