"""model.dtype=auto: bfloat16 for frozen weights under adapters on a GPU, float32 elsewhere, and as in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from components import models, training
from components.checkpoint import stored_dtype_of
from components.config.schema import FinetuneConfig, ModelConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import Attention, DType, WeightInit
from components.config.schema.parallelism import MeshShape, ParallelismConfig, Strategy
from components.distributed.mesh import Mesh
from components.models.tokenizer import byte_tokenizer
from components.planning.formulas.memory import rank_memory
from components.planning.formulas.workload import build_workload
from components.training.preparation import prepare
from tests.distributed.parity import HYBRID_MODELS
from tests.tiny_models import FAMILIES, filled

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LORA = PeftConfig(method="lora", rank=4)


def model(**values: Any) -> ModelConfig:
    return ModelConfig(init=WeightInit.random, tokenizer="bytes", config=FAMILIES["llama"], **values)


def config(peft: PeftConfig = LORA, **values: Any) -> FinetuneConfig:
    parallelism = ParallelismConfig(strategy=Strategy.single, dp_shard=1)
    return FinetuneConfig(model=model(**values), data=DocsDataConfig(), parallelism=parallelism, peft=peft)


@pytest.mark.parametrize(
    ("values", "device", "adapts", "native", "expected"),
    [
        ({}, CUDA, True, True, "bfloat16"),
        ({"compute_dtype": "bfloat16"}, CUDA, True, True, "bfloat16"),
        ({"compute_dtype": "float32"}, CUDA, True, True, "float32"),
        ({}, CUDA, True, False, "float32"),
        ({}, CUDA, False, True, "float32"),
        ({}, CPU, True, True, "float32"),
        ({"dtype": "float32"}, CUDA, True, True, "float32"),
    ],
)
def test_auto_is_bfloat16_for_frozen_weights_on_a_gpu_only(
    values: dict[str, str], device: torch.device, adapts: bool, native: bool, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)
    assert training.stored_dtype(model(**values), device, adapts=adapts) == expected


def test_banner_describes_frozen_weights_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    _, note = training.compute_dtype(model(dtype="bfloat16"), CUDA, adapts=True)
    assert note.startswith("computed in bfloat16; frozen weights in bfloat16, adapters, their gradients and optimizer")
    assert training.compute_dtype(model(dtype="bfloat16"), CUDA)[1].startswith("pure bfloat16")


def test_planned_memory_follows_the_dtype_of_frozen_weights() -> None:
    found = [rank_memory(build_workload(config(), MeshShape(), on_gpu=on_gpu), 0, "cuda") for on_gpu in (False, True)]
    cpu, gpu = ({each.name: each for each in estimate.terms} for estimate in found)
    assert cpu["optimizer"].value == gpu["optimizer"].value  # float32 adapters on both
    built = models.build_on_meta(model())
    models.add_adapters(built, LORA)
    frozen = sum(each.numel() for each in built.parameters() if not each.requires_grad)
    trained = sum(each.numel() for each in built.parameters() if each.requires_grad)
    assert (cpu["parameters"].value, gpu["parameters"].value) == (4 * frozen + 4 * trained, 2 * frozen + 4 * trained)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"extra": {"dtype": "bfloat16"}, "config": "model:\n  dtype: auto\n"}, "bfloat16"),
        ({"extra": {}, "config": "model:\n  dtype: bfloat16\n"}, "bfloat16"),  # of a run before auto existed
        ({"extra": {}, "config": None}, "float32"),
    ],
)
def test_a_resumed_run_keeps_the_dtype_of_its_checkpoint(saved: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(saved))
    assert (stored_dtype_of(tmp_path) or "float32") == expected
    for resume_from, dtype in ((tmp_path, expected), (None, "float32")):
        run = training.RunContext(Mesh(None, MeshShape()), CPU, resume_from=resume_from)
        prepared = prepare(config(), run, 264)
        weight, adapter = prepared.module.lm_head.weight, prepared.module.model.layers[0].mlp.up_proj.lora_A
        assert (str(weight.dtype), adapter.dtype) == (f"torch.{dtype}", torch.float32)
        assert prepared.stored_dtype == dtype
        explicit = prepare(config(dtype="float32"), run, 264)
        assert explicit.module.lm_head.weight.dtype == torch.float32


def test_score_head_is_trained_in_float32_over_frozen_weights_in_bfloat16() -> None:
    cfg = replace(model(), dtype=DType.bfloat16)
    built = models.build_on_meta(cfg, labels=["no", "yes"])
    models.add_adapters(built, LORA)
    models.materialize(built, "cpu")
    models.fill_weights(built, cfg, 0)
    built(input_ids=torch.arange(8)[None]).logits.square().sum().backward()
    assert built.score.weight.grad.dtype == torch.float32
    assert built.model.embed_tokens.weight.dtype == torch.bfloat16


MOE = {
    **{key: value for key, value in FAMILIES["llama"].items() if key != "tie_word_embeddings"},
    "head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "pad_token_id": 0,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": ({**MOE, **LATENT, "n_routed_experts": 4}, "e_score_correction_bias"),
    "glm4_moe": ({**MOE, "n_routed_experts": 4}, "e_score_correction_bias"),
    "ernie4_5_moe": ({**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}, "gate.weight"),
    "bailing_hybrid": ({**MOE, **LATENT, "num_experts": 4}, "conv1d.weight"),
    "olmo_hybrid": ({**FAMILIES["llama"], "num_hidden_layers": 4, "pad_token_id": 0}, "A_log"),
    "gpt_oss": ({**MOE, "num_local_experts": 4}, ""),  # norms are kept in float16 only
}
"""Model type -> its config, and a tensor that bfloat16 models of transformers keep in float32: buffers and parameters
of routers, and parameters of linear attention."""


def saved(folder: Path, family: str) -> Path:
    """Save a model with values that 16 bits round."""
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**KEPT[family][0], "model_type": family}))
    with torch.no_grad():
        for each in built.state_dict().values():
            each.add_(0.01 * torch.rand_like(each))
    built.save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: DType) -> Any:
    cfg = ModelConfig(path=str(folder), tokenizer="bytes", dtype=dtype, attention=Attention.eager)
    return filled(cfg)


@pytest.mark.parametrize("family", ["minimax_m2", "kimi_linear", "deepseek_v3"])
def test_biases_that_balance_experts_are_float32_in_models_of_16_bits(family: str) -> None:
    """Some classes do not list them; 0.5 + 0.001 is 0.5 in bfloat16."""
    config = {
        "minimax_m2": {**FAMILIES["llama"], "num_local_experts": 4, "num_experts_per_tok": 2},
        "kimi_linear": {**HYBRID_MODELS["kimi_linear"]},
        "deepseek_v3": {**MOE, **LATENT, "n_routed_experts": 4},
    }[family] | {"model_type": family}
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", dtype=DType.bfloat16, config=config)
    tensors = {**dict(models.build_on_meta(cfg).named_buffers()), **dict(models.build_on_meta(cfg).named_parameters())}
    found = {each.dtype for name, each in tensors.items() if name.endswith("e_score_correction_bias")}
    assert found == {torch.float32}


@pytest.mark.parametrize("family", KEPT)
def test_tensors_that_transformers_keeps_in_float32_are_not_rounded(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "base", family)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    built = loaded(folder, DType.bfloat16).state_dict()
    assert {name: each.dtype for name, each in built.items()} == {name: each.dtype for name, each in plain.items()}
    assert all(torch.equal(each, plain[name]) for name, each in built.items())
    kept, wide = KEPT[family][1], [name for name, each in built.items() if each.dtype == torch.float32]
    assert any(name.endswith(kept) for name in wide) == bool(kept)
    for dtype in (torch.bfloat16, torch.float16):
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "plain")
        model = loaded(folder, DType.float32)
        export = models.export_model(model, byte_tokenizer(), tmp_path / "export", dtype=dtype)
        theirs, ours = (load_file(each / "model.safetensors") for each in (tmp_path / "plain", export))
        assert {name: each.dtype for name, each in ours.items()} == {name: each.dtype for name, each in theirs.items()}
        assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
