"""Which kernel attends: what a run is told of it, and what is refused where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from components import models
from components.config.errors import ConfigError
from components.config.schema import ModelConfig
from components.config.schema.model import Attention, WeightInit
from components.models.attention import attention_kernel
from components.models.documents import has_kernel
from tests.tiny_models import SIZES, VOCAB

CPU = torch.device("cpu")


def config(attention: str, **values: Any) -> ModelConfig:
    return ModelConfig(
        init=WeightInit.random, tokenizer="bytes", attention=Attention(attention),
        config={"model_type": "qwen3", **SIZES, "head_dim": 8, **values},
    )  # fmt: skip


def told(
    attention: str, dtype: torch.dtype = torch.float32, packed: bool = False, device: torch.device = CPU, **values: Any
) -> str:
    cfg = config(attention, **values)
    return attention_kernel(models.build_on_meta(cfg), cfg, dtype, device, packed)


class Attended(TorchDispatchMode):
    """Remembers the kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.kernels |= {name} if "scaled_dot_product" in name else set()
        return func(*args, **(kwargs or {}))


def test_what_attends_is_told_with_its_reason() -> None:
    flash = "torch's kernel flash_attention"
    assert told("sdpa") == f"attention: sdpa, for heads of 8 in float32 on cpu {flash}"
    assert told("sdpa_flash", torch.bfloat16) == f"attention: sdpa_flash, for heads of 8 in bfloat16 on cpu {flash}"
    assert told("sdpa", packed=True).endswith(f"on cpu and a mask, for documents {flash}")
    windows = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    assert told("sdpa", **windows).endswith(f"on cpu and a mask, for windows {flash}")
    assert told("sdpa", attention_dropout=0.1).endswith("on cpu and dropout 0.1 torch's kernel math")
    assert told("eager") == "attention: eager, transformers' own with its masks"


def test_documents_have_a_kernel_where_values_are_as_wide_as_keys() -> None:
    """On the meta device, which stands for a GPU; values of DeepSeek's latent attention are narrower."""
    for width, half, dropout, expected in (
        (64, torch.bfloat16, 0.0, True),
        (48, torch.bfloat16, 0.0, False),
        (64, torch.float32, 0.0, False),
        (64, torch.float16, 0.1, False),
    ):
        query, value = (torch.empty(1, 4, 16, each, dtype=half, device="meta") for each in (64, width))
        assert has_kernel(query, value, dropout) == expected
        assert not has_kernel(query.to("meta", torch.float64), value, dropout)
    meta = torch.device("meta")
    assert told("sdpa", torch.bfloat16, True, meta).endswith("by torch's kernel for unequal lengths (varlen_attn)")
    latent = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    cfg = config("sdpa")
    cfg.config = {"model_type": "deepseek_v3", **SIZES, **latent, "num_key_value_heads": 4, "first_k_dense_replace": 2}
    said = attention_kernel(models.build_on_meta(cfg), cfg, torch.bfloat16, meta, packed=True)
    assert "heads of 16 in bfloat16 on meta and a mask, for documents" in said


def test_the_flash_kernel_alone_gives_what_torch_would_choose() -> None:
    made = []
    for attention in ("sdpa", "sdpa_flash"):
        model = models.build_on_meta(config(attention))
        models.materialize(model, "cpu")
        models.initialize_weights(model, 0)
        with Attended() as seen:
            loss = model(input_ids=torch.arange(32).reshape(2, 16) % VOCAB, use_cache=False).logits.square().mean()
            loss.backward()
        made.append((loss, model.model.layers[0].self_attn.q_proj.weight.grad))
        assert seen.kernels == {
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        }
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0)


def test_where_there_is_no_flash_kernel_it_is_refused_and_not_replaced() -> None:
    with pytest.raises(
        ConfigError, match=r"sdpa_flash: torch has no flash kernel for heads of 8 .* dropout 0.1; set mo"
    ):
        told("sdpa_flash", attention_dropout=0.1)
    model = models.build_on_meta(config("sdpa_flash", attention_dropout=0.1))
    models.materialize(model, "cpu")
    models.initialize_weights(model, 0)
    with pytest.raises(RuntimeError, match="No available kernel"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)


def test_a_model_that_keeps_its_masks_is_refused_the_flash_kernel() -> None:
    cfg = config("sdpa_flash")
    cfg.config = {"model_type": "gemma3_text", **SIZES, "head_dim": 8, "use_bidirectional_attention": True}
    with pytest.raises(
        ConfigError, match=r"sdpa_flash: Gemma3ForCausalLM attends to both sides; set model.attention=s"
    ):
        models.build_on_meta(cfg)


def test_flex_attention_has_no_backward_on_cpus() -> None:
    """The rule, and what it rests on."""
    with pytest.raises(
        ConfigError, match=r"flex_attention: torch has no backward of it on CPUs; set model.attention=sd"
    ):
        told("flex_attention")
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    with pytest.raises(NotImplementedError):
        flex_attention(query, query, query).sum().backward()
