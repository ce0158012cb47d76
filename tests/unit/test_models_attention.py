"""The attention kernel that a run uses: how it is reported, and which settings are rejected without one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from components import models, training
from components.batch import Batch
from components.config.schema import FinetuneConfig, ModelConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import CAUSAL_SDPA, Attention, WeightInit
from components.models import attention
from components.models.attention import _FA3, causal_sdpa, choose_kernel, observed_call
from components.protocol.errors import ConfigError
from components.torch_kernels import supports_varlen
from components.training import StepSettings, preparation
from components.training.state import TrainState
from tests.distributed.packed import batches_of, packed
from tests.harness import run_ranks
from tests.tiny_models import SIZES, VOCAB

CPU = torch.device("cpu")
FLASH, EFFICIENT = "flash_attention", "efficient_attention"
ROWS = torch.arange(3, 35).reshape(2, 16)
BATCH = Batch.from_labels(ROWS, ROWS)


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


def kernel_report(attention: str, compute: str = "float32", packed_rows: bool = False, **values: Any) -> str:
    cfg = FinetuneConfig(model=config(attention, **values), data=DocsDataConfig(pack=packed_rows))
    batches = batches_of(packed()).at(0) if packed_rows else [BATCH]
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
    assert kernel_report("sdpa") == f"attention: sdpa, {flash} in float32 on cpu"
    assert kernel_report("sdpa_flash", "bfloat16") == f"attention: sdpa_flash, {flash} in bfloat16 on cpu"
    of_documents = kernel_report("sdpa", packed_rows=True)
    assert of_documents == f"attention: sdpa, {flash} in float32 on cpu with a mask for documents"
    windows = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    assert kernel_report("sdpa", **windows) == f"attention: sdpa, {flash} in float32 on cpu with a mask for windows"
    both = kernel_report("sdpa", **windows | {"max_window_layers": 1})
    assert (
        both
        == f"attention: sdpa, {flash} in float32 on cpu, and {flash[12:]} in float32 on cpu with a mask for windows"
    )
    assert kernel_report("eager") == "attention: eager, transformers' own with its masks"


def test_kernel_probe_runs_in_training_mode_and_has_no_side_effects() -> None:
    """Attention dropout, which is off in evaluation, affects the kernel choice. The RNG state is restored."""
    before = torch.get_rng_state()
    assert kernel_report("sdpa", attention_dropout=0.1).endswith(
        "torch's math for heads of 8 in float32 on cpu with dropout 0.1"
    )
    torch.manual_seed(5)
    cfg = FinetuneConfig(model=config("sdpa", attention_dropout=0.1), data=DocsDataConfig())
    model, state = initialized_model(cfg.model), torch.get_rng_state()
    training.check_kernels(training.Prepared(model, StepSettings(CPU)), cfg.model, lambda step: [BATCH])
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
    (reported,) = training.check_kernels(training.Prepared(model, StepSettings(CPU)), cfg.model, lambda step: [BATCH])
    assert "torch's flash_attention" in reported
    assert compiled == []
    training.evaluate(training.Prepared(model, StepSettings(CPU)), [BATCH])
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
    for method in ("sdpa", "sdpa_flash"):
        model = initialized_model(config(method))
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
    message = r"sdpa_flash: torch has no flash kernel for heads of 8 .* dropout 0.1; set mo"
    with pytest.raises(ConfigError, match=message):
        kernel_report("sdpa_flash", attention_dropout=0.1)
    model = initialized_model(config("sdpa_flash", attention_dropout=0.1))
    with pytest.raises(RuntimeError, match="No available kernel"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)


def test_sdpa_flash_is_rejected_for_a_model_that_needs_masks() -> None:
    cfg = config("sdpa_flash")
    cfg.config = {"model_type": "gemma3_text", **SIZES, "head_dim": 8, "use_bidirectional_attention": True}
    message = r"sdpa_flash: Gemma3ForCausalLM uses bidirectional attention; set model.attention=s"
    with pytest.raises(ConfigError, match=message):
        models.build_on_meta(cfg)


def test_flex_attention_is_rejected_on_cpu() -> None:
    """The rule, and the missing backward in torch that is its reason."""
    message = r"flex_attention: torch has no backward for it on CPUs; set model.attention=sd"
    with pytest.raises(ConfigError, match=message):
        kernel_report("flex_attention")
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    with pytest.raises(NotImplementedError):
        flex_attention(query, query, query).sum().backward()


@pytest.fixture(autouse=True)
def _restored_interface() -> Iterator[None]:
    yield
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)


@pytest.mark.parametrize(
    ("rates", "chosen", "reason"),
    [
        (
            {FLASH: 350.0, EFFICIENT: 560.0, _FA3: "flash_attn_interface is not installed"},
            EFFICIENT,
            "chosen by measurement",
        ),
        ({FLASH: 350.0, EFFICIENT: 360.0, _FA3: 610.0}, _FA3, "chosen by measurement"),
        ({FLASH: 350.0, EFFICIENT: 360.0, _FA3: "it needs a Hopper GPU"}, FLASH, "torch's default kept"),
        ({FLASH: "out of memory", EFFICIENT: "No available kernel"}, FLASH, "torch's default kept"),
    ],
)
def test_fastest_kernel_is_chosen_if_it_gains_five_percent(rates: Any, chosen: str, reason: str) -> None:
    found, line = choose_kernel(rates, FLASH)
    assert found == chosen
    assert line.startswith(f"attention kernel: {chosen}, {reason} (flash_attention")
    assert all((f"{name} {rate:,.0f}" if isinstance(rate, float) else f"{name}: {rate}") in line
               for name, rate in rates.items())  # fmt: skip


def test_cudnn_takes_part_in_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a model nor by the choice of a kernel, which restores what was enabled."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default
    model, enabled, original = initialized_model(config("sdpa")), [], attention.sdpa_attention_forward

    def observed(*args: Any, **kwargs: Any) -> Any:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", observed)
    model(ROWS)
    attention.use_kernel(EFFICIENT)
    model(ROWS)
    assert not any([*enabled, torch.backends.cuda.cudnn_sdp_enabled()])
    assert len(enabled) >= 2


def test_flops_of_a_call_are_those_of_its_causal_part() -> None:
    tensors = [torch.randn(2, 3, 8, 4)] * 3
    call = observed_call(scaled_dot_product_attention, tensors, {"is_causal": True})
    assert call.flops == 7 * 2 * 4 * (2 * 3) * (8 * 9 / 2)
    assert call.attend(*tensors).equal(scaled_dot_product_attention(*tensors, is_causal=True))
    rows = [torch.randn(tokens, heads, 4) for tokens, heads in ((6, 3), (14, 1), (14, 1))]
    ends = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 10, 14], dtype=torch.int32)
    call = observed_call(lambda *arguments: arguments[3:], (*rows, *ends, 4, 10), {})
    pairs = (9 + 10) + (1 + 2 + 3 + 4)
    assert call.flops == 7 * 2 * 4 * 3 * pairs
    assert call.attend(*rows)[2:] == (4, 10)


def orders_of(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[tuple[bool, str]]:
    """Return whether each attention call had a mask, and the kernel that torch tries first."""
    seen, original = [], attention.sdpa_attention_forward

    def observed(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((mask is not None, SDPBackend(torch._C._get_sdp_priority_order()[0]).name))
        return original(module, query, key, value, mask, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(attention, "sdpa_attention_forward", observed)
        run()
    return seen


def test_preferred_kernel_is_tried_first_where_there_is_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
              "use_sliding_window": True}  # fmt: skip
    model = initialized_model(config("sdpa", **values))
    before = orders_of(monkeypatch, lambda: model(ROWS))
    expected = model(ROWS).logits
    attention.use_kernel(EFFICIENT)
    assert orders_of(monkeypatch, lambda: model(ROWS)) == [(True, before[0][1]), (False, "EFFICIENT_ATTENTION")]
    assert before[1][1] != "EFFICIENT_ATTENTION"
    assert model(ROWS).logits.equal(expected)  # a CPU has no such kernel: the next one that supports the inputs
    models.compile_layers(model, backend="aot_eager")  # without a graph break
    torch.testing.assert_close(model(ROWS).logits, expected)


def test_all_ranks_use_the_kernel_that_rank_0_found_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_can_measure", lambda device: True)
    cfg = config("sdpa")
    model = initialized_model(cfg)
    prepared = training.Prepared(model, StepSettings(CPU))

    def on_rank(rank: int) -> tuple[list[str], list[tuple[bool, str]]]:
        rates = {FLASH: 300.0, EFFICIENT: 500.0 if rank == 0 else 100.0}
        monkeypatch.setattr(attention, "measure_kernels", lambda call, default: {default: 300.0, **rates})
        lines = training.check_kernels(prepared, cfg, lambda step: [BATCH])
        return lines, orders_of(monkeypatch, lambda: model(ROWS))

    ranks = run_ranks(2, on_rank)
    assert ranks[0] == ranks[1]
    lines, orders = ranks[0]
    assert lines[0].startswith("attention: sdpa, observed as torch's")
    assert lines[1].startswith("attention kernel: efficient_attention, chosen by measurement (")
    assert {order for _, order in orders} == {"EFFICIENT_ATTENTION"}


@pytest.mark.parametrize(
    ("saved", "used"), [(EFFICIENT, EFFICIENT), (FLASH, FLASH), (_FA3, EFFICIENT), ("math", EFFICIENT)]
)
def test_resumed_run_uses_the_kernel_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch, saved: str, used: str) -> None:
    """Unless this machine does not have it: then the kernels are measured again."""
    monkeypatch.setattr(preparation, "_can_measure", lambda device: True)
    measured = {EFFICIENT: 500.0} if used != saved else {FLASH: 900.0, EFFICIENT: 1.0}
    monkeypatch.setattr(attention, "measure_kernels", lambda call, default: {default: 300.0, **measured})
    cfg = config("sdpa")
    model = initialized_model(cfg)
    before = orders_of(monkeypatch, lambda: model(ROWS))
    state = TrainState.from_dict(TrainState(step=5, attention_kernel=saved).to_dict())
    run = SimpleNamespace(state=state, print=lambda *lines: None)
    prepared = training.Prepared(model, StepSettings(CPU))
    _, line = training.check_kernels(prepared, cfg, lambda step: [BATCH], run)
    reason = "that of the checkpoint" if used == saved else "chosen by measurement ("
    assert line.startswith(f"attention kernel: {used}, {reason}")
    assert state.attention_kernel == used
    first = "EFFICIENT_ATTENTION" if used == EFFICIENT else "FLASH_ATTENTION"
    assert {order for _, order in orders_of(monkeypatch, lambda: model(ROWS))} == {first}
    assert {order for _, order in before} != {"EFFICIENT_ATTENTION"}


def test_nothing_is_measured_without_a_gpu_or_in_deterministic_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not preparation._can_measure(CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert preparation._can_measure(torch.device("cuda"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not preparation._can_measure(torch.device("cuda"))


def test_kernels_are_measured_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without synchronization: torch's own kernel has a rate, and the other a reason."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    call = observed_call(scaled_dot_product_attention, tensors, {"is_causal": True})
    rates = attention.measure_kernels(call, FLASH)
    assert isinstance(rates[FLASH], float)
    assert rates[FLASH] > 0
    assert isinstance(rates[EFFICIENT], str)
    assert rates[_FA3] == "flash_attn_interface is not installed"
    with sdpa_kernel(SDPBackend.MATH):  # restored afterwards
        assert isinstance(attention.measure_kernels(call, "math")["math"], float)
