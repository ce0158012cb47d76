"""FLOPs of a step compared with torch's FlopCounterMode, peak TFLOPs, MFU, garbage collection and profiling."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from components import observability, training
from components.batch import Batch
from components.config.schema.model import MIXERS
from components.config.schema.run import LoggingConfig, ProfileConfig
from components.training.state import StepMetrics
from components.training.step_cost import _PEAK_TFLOPS, StepProfile, _document_lengths, model_flops, pairs, peak_tflops
from tests.distributed.parity import HYBRID_MODELS, MODELS, MOE_MODELS, SMALL

CPU = torch.device("cpu")
SEQ = 24
COUNTED: dict[str, dict[str, Any]] = {
    "llama": MODELS["llama"],
    "llama_tied": MODELS["llama_tied"],
    "qwen3": {**MODELS["qwen3"], "head_dim": 20},  # not hidden / heads
    "gemma": {**MODELS["gemma"], "head_dim": 24},
    "gpt2": MODELS["gpt2"],
    "mixtral": {**MOE_MODELS["mixtral"], "num_local_experts": 6},
    "qwen3_moe": MOE_MODELS["qwen3_moe"],
    "gemma3": {**SMALL, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6,
               "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
}  # fmt: skip


def build(name: str) -> Any:
    values = dict((COUNTED | HYBRID_MODELS)[name])
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name in MOE_MODELS or getattr(model.config, "num_experts_per_tok", None):
        model.set_experts_implementation("eager")
    return model


def counted(model: nn.Module) -> int:
    """Return torch's FLOP count for forward and backward of one row, without the rotary embedding."""
    tokens = torch.randint(3, 97, (1, SEQ))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    modules = counter.get_flop_counts()
    rotary = next((modules[name] for name in modules if name.endswith("rotary_emb")), {})
    return counter.get_total_flops() - sum(rotary.values())


@pytest.mark.parametrize("name", COUNTED)
def test_flops_match_the_torch_flop_counter(name: str) -> None:
    """Eager attention computes every pair of tokens, masked or not, so the comparison uses SEQ**2 pairs."""
    model = build(name)
    flops = model_flops(model)
    assert flops.per_token * SEQ + sum(each for _, each in flops.per_pair) * SEQ**2 == counted(model)
    assert flops.of([SEQ]) < counted(model)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_flops_exclude_weight_gradients_of_frozen_matrices(name: str) -> None:
    model = build(name)
    for module in (model.lm_head, model.model.layers[-1].mlp):
        module.requires_grad_(False)
    flops = model_flops(model)
    assert flops.per_token * SEQ + sum(each for _, each in flops.per_pair) * SEQ**2 == counted(model)


def test_attention_pairs_match_a_causal_sliding_window_mask() -> None:
    for length in (1, 5, 24):
        for window in (None, 1, 5, 24, 30):
            positions = torch.arange(length)
            distance = positions[:, None] - positions[None, :]
            mask = (distance >= 0) & (distance < (window or length))
            assert pairs(length, window) == mask.sum()
    windows = dict(model_flops(build("gemma3")).per_pair)
    assert windows == {8: 5 * 6 * 4 * 16, None: 1 * 6 * 4 * 16}  # five sliding-window layers and a full one


def test_flops_of_unsupported_layer_types_are_rejected() -> None:
    model = build("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match="layers of linear_attention"):
        model_flops(model)
    with pytest.raises(NotImplementedError, match="zamba2 does not give the size of the recurrent state"):
        model_flops(build("zamba2"))


STATES = {
    "qwen3_5_text": 6 * 8 * 8 * 4,  # 8 value heads, keys of 8, values of 4
    "kimi_linear": 6 * 4 * 8 * 8,
    "nemotron_h": 4 * 8 * 12 * 8,  # 8 heads of 12, states of 8
    "falcon_h1": 2 * 4 * 8 * 12 * 8,
    "lfm2": 0,
}
"""FLOPs of a forward per token in the recurrences."""


@pytest.mark.parametrize("name", STATES)
def test_flops_of_hybrid_models_match_the_torch_flop_counter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without convolutions, whose groups the counter ignores, and recurrences, which are computed in chunks."""
    model = build(name)
    modeling = sys.modules[type(model).__module__]

    def no_convolution(hidden_states: torch.Tensor, weight: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        return hidden_states + weight.sum() * 0.0

    def no_recurrence(first: Any, second: Any, third: Any, *others: Any, **options: Any) -> Any:
        inputs = (each for each in (first, second, third, *others, *options.values()) if isinstance(each, torch.Tensor))
        zero = sum(each.sum() for each in inputs) * 0.0
        return first + zero if "chunk_size" in options else (third + zero, None)

    for function, planted in zip(MIXERS[name], (no_convolution, no_recurrence), strict=False):
        monkeypatch.setattr(modeling, function, planted)
    flops = model_flops(model)
    convolutions = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Conv1d))
    everything = flops.per_token * SEQ + sum(each for _, each in flops.per_pair) * SEQ**2
    assert everything - (6 * convolutions + 3 * STATES[name]) * SEQ == counted(model)


def test_document_lengths_exclude_padding_and_separate_documents() -> None:
    labels = torch.tensor([[-100, -100, 5, 6, -100, -100], [-100] * 6, [-100, 1, 2, -100, 3, 4]])
    assert _document_lengths(Batch.from_labels(labels, labels)) == [4, 0, 6]
    bounds = torch.tensor([[0, 2, 4, 6, 6], [0, 6, 6, 6, 6], [0, 3, 6, 6, 6]], dtype=torch.int32)
    assert _document_lengths(Batch.from_labels(labels, labels, document_bounds=bounds)) == [2, 2, 3, 3]
    assert _document_lengths(Batch.from_labels(labels, labels).to(torch.device("meta"))) == []


def test_peak_tflops_requires_the_exact_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, bf16 = LoggingConfig(), torch.bfloat16
    assert peak_tflops(quiet, CPU, bf16) == (None, "")
    assert peak_tflops(LoggingConfig(peak_tflops=0.5), CPU, bf16)[0] == 0.5
    for name, expected in (*_PEAK_TFLOPS.items(), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA H100", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(quiet, torch.device("cuda", 0), bf16)[0] == expected
        assert peak_tflops(quiet, torch.device("cuda", 0), torch.float32)[0] is None


def test_reporter_logs_mfu_per_step_and_in_the_result(tmp_path: Path) -> None:
    logging = LoggingConfig(plot=False)
    report = observability.Reporter(logging, str(tmp_path), enabled=True)
    batches = iter([1, 2, 3])
    for number in (1, 2, 3):
        assert report.next_batch(batches) == number
        flags = {"skipped": False, "preempt": False, "interrupt": False, "must_save": False}
        report.step(StepMetrics(number, 1.0, 1.0, 10, 0.5, **flags, seconds_at_peak=0.1 * number), lr=0.1, tokens=10)
    numbers = {"steps": 3, "processes": 1, "wall_seconds": 9.0, "peak_memory_bytes": 1}
    result = observability.Result(status="ok", mesh="1", first_loss=1.0, last_loss=1.0, **numbers)
    report.finish(result)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["mfu"] for line in lines] == [0.2, 0.4, 0.6]
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["mfu"] == 0.5  # without the first line, which includes warm-up
    assert stored["seconds_to_first_step"] == pytest.approx(9.0, abs=1.0)
    assert stored["data_wait_seconds"] >= 0


def test_garbage_is_collected_only_between_steps() -> None:
    collected: list[str] = []

    def watch(phase: str, _: Any) -> None:
        if phase == "start":
            collected.append(phase_of_step)

    gc.callbacks.append(watch)
    try:
        phase_of_step = "start"
        with training.GarbageCollection(every=2) as garbage:
            assert not gc.isenabled()
            for _ in range(4):
                with garbage.step():
                    phase_of_step = "in a step"
                    rings: list[Any] = []
                    for _ in range(3000):
                        ring: list[Any] = []
                        ring.append(ring)
                        rings.append(ring)
                    phase_of_step = "between steps"
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        assert collected.count("between steps") == 2
        assert "in a step" not in collected
    finally:
        gc.callbacks.remove(watch)
    with training.GarbageCollection(every=0):
        assert gc.isenabled()


def test_profile_covers_only_the_configured_steps_and_ranks(tmp_path: Path) -> None:
    messages: list[str] = []
    for cfg in (ProfileConfig(), ProfileConfig(enabled=True, ranks=[1])):
        profile = StepProfile(cfg, str(tmp_path), messages.append)
        for _ in range(12):
            with profile.step():
                torch.ones(2) + 1
        assert not list(tmp_path.iterdir())
    profile = StepProfile(ProfileConfig(enabled=True, start=2, steps=2), str(tmp_path), messages.append)
    for number in range(5):
        with profile.step():
            torch.ones(3 + number).cumsum(0)
    trace = json.loads((tmp_path / "profile" / "rank_0.json").read_text())
    assert sum(event.get("name") == "aten::cumsum" for event in trace["traceEvents"]) == 2
    assert "aten::cumsum" in (tmp_path / "profile" / "rank_0.txt").read_text()
    profile.finish()
    assert len(messages) == 1
    late = StepProfile(ProfileConfig(enabled=True, start=6, steps=2), str(tmp_path), messages.append)
    with late.step():
        pass
    late.finish()
    assert messages[1].startswith("no profile of steps 6 to 7 of this attempt, which had 1: ")
