"""Families whose tensor-parallel plan is in tp_plan.py, and others, against plain transformers in one process.

float64: the gradient of every parameter in the first step, within 1e-10 relative. `make parity` adds five steps in
float32, 4 ranks, and meshes with other axes.
"""

from __future__ import annotations

import re
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from components.distributed import mixer_parallel, tensor_parallel, tp_plan
from components.distributed.tp_plan import FAMILY_PLANS
from components.models.anatomy import read_anatomy
from components.planning import parity_reference as plain
from components.protocol.errors import ConfigError
from tests.distributed.parity import HYBRID_MODELS, LATENT, SMALL, Case, build, exact_loss, reference, run_case
from tests.distributed.test_parity import FSDP2_TP2, SP, TP, check
from tests.harness import run_ranks
from tests.suites import PARITY, in_parity

PP_TP = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2, "tp": 2}
EP_TP = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2, "tp": 2}
ONE_KV_HEAD = {"num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.25},
    "cohere_one_kv_head": {"model_type": "cohere", "use_qk_norm": True, **ONE_KV_HEAD},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 6},
    **{name: HYBRID_MODELS[name] for name in ("bailing_hybrid", "falcon_h1", "granitemoehybrid", "kimi_linear")},
    **{name: HYBRID_MODELS[name] for name in ("lfm2_moe", "nemotron_h")},
    "bamba": {**HYBRID_MODELS["bamba"], "mamba_n_groups": 1},  # one norm over the features of all ranks
    "deepseek_v3": {**LATENT, "model_type": "deepseek_v3", "q_lora_rank": 12, "n_routed_experts": 4, "n_group": 2,
                    "topk_group": 1},
    "mistral4": {**LATENT, "model_type": "mistral4", "q_lora_rank": 12, "n_routed_experts": 4, "n_group": 2,
                 "topk_group": 1},
    "gpt2": {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 8},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
             "conv_bias": True},
    "stablelm": {"model_type": "stablelm", "hidden_size": 32, "qk_layernorm": True},
    "stablelm_one_kv_head": {"model_type": "stablelm", "hidden_size": 32, "qk_layernorm": True, "use_qkv_bias": True,
                             "use_parallel_residual": True, **ONE_KV_HEAD},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "stablelm_3_heads": {"model_type": "stablelm", "hidden_size": 24, "qk_layernorm": True, "num_attention_heads": 3,
                         "num_key_value_heads": 3},
    "gpt_oss_one_kv_head": {**FAMILIES["gpt_oss"], **ONE_KV_HEAD},
    "cohere_plain": {"model_type": "cohere"},
    "stablelm_plain": {"model_type": "stablelm", "hidden_size": 32},
    "hunyuan_one_kv_head": {**FAMILIES["hunyuan_v1_dense"], **ONE_KV_HEAD},
    "lfm2_one_kv_head": {**FAMILIES["lfm2"], **ONE_KV_HEAD},
    "falcon_h1_norm": {**HYBRID_MODELS["falcon_h1"], "mamba_rms_norm": True, "mamba_n_groups": 1,
                       "mamba_norm_before_gate": True},
}  # fmt: skip
CHOSEN = FAMILIES | VARIANTS if PARITY else FAMILIES
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
GEMMA4 = {"model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
          "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
          "tie_word_embeddings": True, **ALTERNATING}  # fmt: skip
"""tp=2 divides the two key-value heads of the layer with a window, and each rank has the one head of the other."""
TRANSFORMERS_PLANS: dict[str, dict[str, Any]] = {
    "ministral": {"model_type": "ministral", "head_dim": 8, **ALTERNATING},
    "olmo2": {"model_type": "olmo2"},  # norms over all heads of queries and keys, and after attention and MLP
    "olmo3": {"model_type": "olmo3", **ALTERNATING},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},  # the second layer has no rotary embedding
    "glm4": {"model_type": "glm4", "head_dim": 8},  # four norms per layer, half of each head is rotated
    "nemotron": {"model_type": "nemotron"},  # LayerNorm with 1 + weight, squared ReLU without a gate
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 8, "use_bias": True},
    **{name: HYBRID_MODELS[name] for name in ("qwen3_5_text", "qwen3_next", "olmo_hybrid")},
    "ministral3": {"model_type": "ministral3", "head_dim": 8},
    "minimax_m2": {"model_type": "minimax_m2", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4": GEMMA4,
    "gemma4_experts": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "qwen3_5_3_heads": {**HYBRID_MODELS["qwen3_5_text"], "linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "qwen3_5_1_key_head": {**HYBRID_MODELS["qwen3_5_text"], "linear_num_key_heads": 1},
}
"""Families with options in conf/model whose plan is that of transformers, and which no other test trains."""
PRODUCTS = [FSDP2_TP2, {**FSDP2_TP2, **SP}, TP, {**TP, **SP}, {**PP_TP, **SP}, EP_TP]
"""Meshes of four ranks, in `make parity`; those with ep for families with experts."""
WITH_EXPERTS = (
    *("gpt_oss", "gpt_oss_one_kv_head", "granitemoehybrid", "kimi_linear", "lfm2_moe", "nemotron_h", "gemma4_experts"),
    *("deepseek_v3", "mistral4", "minimax_m2"),
)
UNSHARDED_SEQUENCES = ("gemma4_experts",)
"""Families whose experts take the tokens of all rows together, so that sequence parallel is rejected."""
WITH_CP = {"strategy": "fsdp2", "dp_shard": 2, "cp": 2}
"""Another mesh of four ranks, in `make parity`, for families that can be split along the sequence."""


def build_family(name: str, dtype: torch.dtype) -> nn.Module:
    """Build a model whose forward is float64 throughout if `dtype` is; Cohere and ERNIE rotate queries in float32."""
    model = build(name, dtype, {**SMALL, **(FAMILIES | VARIANTS | TRANSFORMERS_PLANS)[name]})
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__ in ("CohereAttention", "Ernie4_5Attention"):
            module.forward = types.MethodType(plain._forward_in_float64, module)
    return model


def deviations(world: int, meshes: list[dict[str, Any]], names: list[str], dtype: torch.dtype, steps: int) -> list[str]:
    """Return one line for each deviation of a family on a mesh from one process."""
    cases = [
        Case(name, mesh, 1 + ("pp" in mesh), steps, dtype, loss=exact_loss(name)) for name in names for mesh in meshes
    ]
    cases = [each for each in cases if "ep" not in each.parallelism or each.model in WITH_EXPERTS]
    cases = [
        each for each in cases if not (each.parallelism.get("sequence_parallel") and each.model in UNSHARDED_SEQUENCES)
    ]
    expected = {
        name: reference(replace(cases[0], model=name, dtype=torch.float64), build_family(name, torch.float64))
        for name in names
    }
    built = {name: build_family(name, dtype) for name in names}

    def on_rank(rank: int) -> list[str]:
        return [
            line for case in cases for line in check(case, expected[case.model], *run_case(case, built[case.model]))
        ]

    return sorted({line for lines in run_ranks(world, on_rank, timeout=1800) for line in lines})


def test_families_match_one_process_on_tp() -> None:
    problems = deviations(2, [TP, {**TP, **SP}], list(CHOSEN), torch.float64, 1)
    assert not problems, "\n".join(problems)


def test_families_with_a_plan_of_transformers_match_one_process() -> None:
    problems = deviations(4, [FSDP2_TP2], list(TRANSFORMERS_PLANS), torch.float64, 1)
    assert not problems, "\n".join(problems)


def test_a_missing_sum_over_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: the weight of a norm for all heads, the squares of a norm over all ranks, a layer's own parameters."""
    faults = {
        "qwen3_5_text": ("ReplicatedParameters", lambda partial_grad: tensor_parallel.ReplicatedParameters()),
        "bamba": ("all_reduce", lambda squares, group: squares),
        "kimi_linear": ("Partial", tensor_parallel.Replicate),
    }
    for name, (part, planted) in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(mixer_parallel, part, planted)
            problems = deviations(2, [TP], [name], torch.float64, 1)
        errors = [float(error) for line in problems for error in re.findall(r"gradient of .* is off by (\S+)", line)]
        assert max(errors) > 1e-3, name


def test_every_plan_of_the_table_is_tested() -> None:
    assert {values["model_type"] for values in FAMILIES.values()} == set(FAMILY_PLANS)


def test_norms_of_single_heads_without_a_plan_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_plan, "FAMILY_PLANS", {})
    model = build_family("cohere", torch.float32)
    plan = tp_plan.shard_plan(model, read_anatomy(model))
    with pytest.raises(ConfigError, match=r"self_attn.q_norm has a weight for each head, and tp divides heads"):
        tp_plan.check_covered(model, plan, 2)


@in_parity
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_families_match_one_process_on_products_of_four_ranks(dtype: torch.dtype) -> None:
    names, steps = [name for name in CHOSEN if "3_heads" not in name], 1 if dtype == torch.float64 else 5
    problems = deviations(4, PRODUCTS, names, dtype, steps)
    assert not problems, "\n".join(problems)


@in_parity
def test_families_with_a_plan_of_transformers_match_on_more_meshes() -> None:
    problems = deviations(4, [*PRODUCTS, WITH_CP], list(TRANSFORMERS_PLANS), torch.float64, 1)
    assert not problems, "\n".join(problems)


@in_parity
def test_families_match_one_process_for_five_steps_in_float32() -> None:
    problems = deviations(2, [TP, {**TP, **SP}], list(CHOSEN), torch.float32, 5)
    assert not problems, "\n".join(problems)
