"""The attention kernel that a run uses: how it is reported, and which settings are rejected without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from components import models, training
from components.batch import Batch
from components.config.schema import FinetuneConfig, ModelConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import Attention, WeightInit
from components.protocol.errors import ConfigError
from components.training import StepSettings
from components.varlen import supports_varlen
from tests.distributed.packed import batches_of, packed
from tests.tiny_models import SIZES, VOCAB

CPU = torch.device("cpu")


def config(attention: str, **values: Any) -> ModelConfig:
    return ModelConfig(
        init=WeightInit.random, tokenizer="bytes", attention=Attention(attention),
        config={"model_type": "qwen3", **SIZES, "head_dim": 8, **values},
    )  # fmt: skip


def initialized_model(cfg: ModelConfig) -> Any:
    model = models.build_on_meta(cfg)
    models.materialize(model, "cpu")
    models.initialize_weights(model, 0)
    return model


def attention_report(attention: str, compute: str = "float32", packed_rows: bool = False, **values: Any) -> str:
    cfg = FinetuneConfig(model=config(attention, **values), data=DocsDataConfig(pack=packed_rows))
    rows = torch.arange(3, 35).reshape(2, 16)
    batches = batches_of(packed()).at(0) if packed_rows else [Batch.from_labels(rows, rows)]
    autocast = None if compute == "float32" else getattr(torch, compute)
    prepared = training.Prepared(initialized_model(cfg.model), StepSettings(CPU, autocast=autocast))
    return training.check_kernels(prepared, cfg.model, lambda step: batches)[0]


class KernelRecorder(TorchDispatchMode):
    """Record the attention kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.kernels |= {name} if "scaled_dot_product" in name else set()
        return func(*args, **(kwargs or {}))


def test_attention_kernel_is_reported_with_its_inputs() -> None:
    flash = "observed as torch's flash_attention for heads of 8"
    assert attention_report("sdpa") == f"attention: sdpa, {flash} in float32 on cpu"
    assert attention_report("sdpa_flash", "bfloat16") == f"attention: sdpa_flash, {flash} in bfloat16 on cpu"
    assert (
        attention_report("sdpa", packed_rows=True)
        == f"attention: sdpa, {flash} in float32 on cpu with a mask for documents"
    )
    windows = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    assert attention_report("sdpa", **windows) == f"attention: sdpa, {flash} in float32 on cpu with a mask for windows"
    both = attention_report("sdpa", **windows | {"max_window_layers": 1})
    assert (
        both
        == f"attention: sdpa, {flash} in float32 on cpu, and {flash[12:]} in float32 on cpu with a mask for windows"
    )
    assert attention_report("eager") == "attention: eager, transformers' own with its masks"


def test_kernel_probe_runs_in_training_mode_and_has_no_side_effects() -> None:
    """Attention dropout, which is off in evaluation, affects the kernel choice. The RNG state is restored."""
    before = torch.get_rng_state()
    assert attention_report("sdpa", attention_dropout=0.1).endswith(
        "torch's math for heads of 8 in float32 on cpu with dropout 0.1"
    )
    torch.manual_seed(5)
    cfg = FinetuneConfig(model=config("sdpa", attention_dropout=0.1), data=DocsDataConfig())
    model, state = initialized_model(cfg.model), torch.get_rng_state()
    rows = torch.arange(3, 35).reshape(2, 16)
    training.check_kernels(
        training.Prepared(model, StepSettings(CPU)), cfg.model, lambda step: [Batch.from_labels(rows, rows)]
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(before, state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_kernel_probe_does_not_compile_layers() -> None:
    cfg = FinetuneConfig(model=config("sdpa"), data=DocsDataConfig())
    model, compiled = initialized_model(cfg.model), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    models.compile_layers(model, backend=backend)
    rows = torch.arange(3, 35).reshape(2, 16)
    batch = Batch.from_labels(rows, rows)
    (reported,) = training.check_kernels(training.Prepared(model, StepSettings(CPU)), cfg.model, lambda step: [batch])
    assert "torch's flash_attention" in reported
    assert compiled == []
    training.evaluate(training.Prepared(model, StepSettings(CPU)), [batch])
    assert compiled


def test_varlen_kernel_requires_half_precision_no_dropout_and_equal_head_dims() -> None:
    """The meta device replaces a GPU. Values narrower than keys occur in DeepSeek's latent attention."""
    for value_dim, dtype, dropout, expected in (
        (64, torch.bfloat16, 0.0, True),
        (48, torch.bfloat16, 0.0, False),
        (64, torch.float32, 0.0, False),
        (64, torch.float16, 0.1, False),
    ):
        query, value = (torch.empty(1, 4, 16, dim, dtype=dtype, device="meta") for dim in (64, value_dim))
        assert supports_varlen(query, value, dropout) == expected
        assert not supports_varlen(query.to("meta", torch.float64), value, dropout)


def test_sdpa_flash_equals_the_kernel_that_torch_chooses() -> None:
    results = []
    for attention in ("sdpa", "sdpa_flash"):
        model = initialized_model(config(attention))
        with KernelRecorder() as recorder:
            loss = model(input_ids=torch.arange(32).reshape(2, 16) % VOCAB, use_cache=False).logits.square().mean()
            loss.backward()
        results.append((loss, model.model.layers[0].self_attn.q_proj.weight.grad))
        assert recorder.kernels == {
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        }
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_sdpa_flash_without_a_flash_kernel_is_rejected_and_never_falls_back() -> None:
    with pytest.raises(
        ConfigError, match=r"sdpa_flash: torch has no flash kernel for heads of 8 .* dropout 0.1; set mo"
    ):
        attention_report("sdpa_flash", attention_dropout=0.1)
    model = initialized_model(config("sdpa_flash", attention_dropout=0.1))
    with pytest.raises(RuntimeError, match="No available kernel"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)


def test_sdpa_flash_is_rejected_for_a_model_that_needs_masks() -> None:
    cfg = config("sdpa_flash")
    cfg.config = {"model_type": "gemma3_text", **SIZES, "head_dim": 8, "use_bidirectional_attention": True}
    with pytest.raises(
        ConfigError, match=r"sdpa_flash: Gemma3ForCausalLM uses bidirectional attention; set model.attention=s"
    ):
        models.build_on_meta(cfg)


def test_flex_attention_is_rejected_on_cpu() -> None:
    """The rule, and the missing backward in torch that is its reason."""
    with pytest.raises(
        ConfigError, match=r"flex_attention: torch has no backward for it on CPUs; set model.attention=sd"
    ):
        attention_report("flex_attention")
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    with pytest.raises(NotImplementedError):
        flex_attention(query, query, query).sum().backward()
