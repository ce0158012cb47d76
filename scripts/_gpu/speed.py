"""Checks of speed: compiled layers, throughput, loss, attention, float8, NF4, time during which the GPU is busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from components.models import attention_choice
from components.models.attention import AttentionProbe
from components.models.quantization.nf4 import level_pairs, pack, unpack
from components.training.objectives import PLAIN
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from scripts._gpu.correct import BF16
from scripts._gpu.step import GEMMA3, LLAMA_1B, TINY, Shape, synchronize, training_step
from scripts._gpu.verdict import Line, at_least, at_most, skipped

PREDICTED = {"H200": 64_700, "H100": 57_500}
"""Tokens/s of 1B, all parameters, compiled, by `python -m tests.gpu_ready.roofline`."""
SHORT = {**LLAMA_1B, "num_hidden_layers": 8}
ROWS = Shape(tokens=4096, rows=4, micro_batches=2, documents=1)
SMALL_ROWS = Shape(tokens=64, rows=2, micro_batches=2, documents=1)


def busy(device: str, small: bool) -> Iterator[Line]:
    """Share of the wall time of steps 5 to 8 during which a kernel runs."""
    if device != "cuda":
        yield skipped("GPU busy", "needs a GPU")
        return
    from torch.profiler import ProfilerActivity, profile

    with training_step({**LLAMA_1B, "num_hidden_layers": 4}, ROWS, device, **BF16) as step:
        step.run(4)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            began = time.perf_counter()
            step.run(4)
            torch.cuda.synchronize()
            wall = time.perf_counter() - began
    spans = sorted(
        (each.time_range.start, each.time_range.end) for each in recorded.events() if each.device_type.name == "CUDA"
    )
    total, reached = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    yield at_least("share of the wall time with a running kernel", total / 1e6 / wall, 0.95)


def compiled(device: str, small: bool) -> Iterator[Line]:
    """Compiled layers against eager ones: losses, speed, and rows of many lengths."""
    config, rows = (TINY, SMALL_ROWS) if small else (SHORT, ROWS)
    seconds, curves = {}, {}
    for compile_layers in ("false", "true"):
        with training_step(config, rows, device, compile=compile_layers, **BF16) as step:
            curves[compile_layers] = step.curve(6)
            seconds[compile_layers] = step.seconds(6, 1)
    difference = max(abs(one / other - 1) for one, other in zip(curves["true"], curves["false"], strict=True))
    yield at_most("packed: relative difference of the loss", difference, 2e-2)
    yield at_least("packed: eager / compiled step time", seconds["false"] / seconds["true"], 1.15)
    lengths = Shape(tokens=64, rows=2, pack=False, lengths=(10, 24, 64, 33, 48, 17))
    for name, config, peft in (("Llama", TINY, "none"), ("Gemma 3 with adapters", GEMMA3, "lora")):
        torch._dynamo.reset()
        before = _graphs()
        with training_step(config, lengths, device, peft=peft, compile="true", **BF16) as step:
            step.run(3)
            first = _graphs() - before
            step.run(6)
        yield at_most(f"{name}, rows of six lengths: graphs after step 3", _graphs() - before - first, 2)


def throughput(device: str, small: bool) -> Iterator[Line]:
    """Tokens/s of 1B with all parameters, rows of one and of many documents, as a run on a GPU is configured."""
    config = TINY if small else LLAMA_1B
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    predicted = next((value for key, value in PREDICTED.items() if key in name), None)
    for what, documents in (("one document a row", 1), ("16 documents a row", 16)):
        rows = Shape(64 if small else 4096, 2 if small else 4, 2, documents)
        for compile_layers in ("false", "true"):
            with training_step(config, rows, device, compile=compile_layers, fused="all", **BF16) as step:
                rate = step.tokens / step.seconds(8, 4)
            label = f"{what}, {'compiled' if compile_layers == 'true' else 'fused layers'}: tokens/s"
            if predicted is None or documents > 1 or compile_layers == "false":
                yield Line(label, f"{rate:,.0f}")
            else:
                line = at_least(label, rate / predicted, 0.85)
                yield Line(label, f"{rate:,.0f}", "at least 85 % of the prediction", line.verdict, f"{predicted:,}")


def loss(device: str, small: bool) -> Iterator[Line]:
    """The chunked loss against its three matrix products alone, and against all logits at once."""
    tokens, width, vocabulary = (512, 64, 1024) if small else (16384, 2048, 128256)
    place = torch.device(device)
    hidden = torch.randn(tokens, width, device=place, dtype=torch.bfloat16)
    weight = (torch.randn(vocabulary, width, device=place) * width**-0.5).bfloat16()
    ids = torch.randint(0, vocabulary, (tokens,), device=place)
    products = 3 * _seconds(lambda: hidden @ weight.t(), place)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    F.cross_entropy((leaves[0] @ leaves[1].t()).float(), ids, reduction="sum").backward()
    expected = [each.grad for each in leaves]
    for name, head in (("eager", Head()), ("compiled", Head(compiled=True))):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]

        def whole(head: Head = head, leaves: list[torch.Tensor] = leaves) -> None:
            leaves[0].grad = leaves[1].grad = None
            linear_token_loss(*leaves, None, Targets(ids, tokens), head, PLAIN.token_loss).backward()  # type: ignore[misc]

        taken = _seconds(whole, place)
        for what, got, exact in zip(("hidden states", "weight"), leaves, expected, strict=True):
            worst = ((got.grad - exact).norm() / exact.norm()).item()  # type: ignore[union-attr, operator]
            yield at_most(f"{name}: relative error of the gradient of the {what}", worst, 1e-2)
        bound = 1.3 if name == "compiled" else 2.0
        yield at_most(f"{name}: time / time of three matrix products", taken / products, bound, speed=True)


def attention(device: str, small: bool) -> Iterator[Line]:
    """TFLOP/s of forward and backward of the installed kernels at two lengths, and the kernel that a run would use."""
    if device != "cuda":
        yield skipped("attention kernels", "needs a GPU")
        return
    for tokens in (4096,) if small else (4096, 32768):
        query, key, value = (torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        rows = [each[0].transpose(0, 1) for each in (query, key, value)]
        ends = torch.arange(0, tokens + 1, 1024, dtype=torch.int32, device="cuda")
        calls = {
            "one document": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),  # noqa: B023
            "documents of 1,024": lambda: varlen_attn(*rows, ends, ends, 1024, 1024, window_size=(-1, 0)),  # noqa: B023
        }
        for what, run in calls.items():
            with AttentionProbe() as probe:
                run()
            default = probe.observed[0].kernel
            rates = attention_choice.measure_kernels(attention_choice.observed_call(*probe.first), default)
            for name, rate in rates.items():
                yield Line(
                    f"{tokens:,} tokens, {what}, {name}", rate if isinstance(rate, str) else f"{rate:,.0f} TFLOP/s"
                )
            chosen, _ = attention_choice.choose_kernel(rates, default)
            yield Line(f"{tokens:,} tokens, {what}: torch uses {default}, runs use", chosen)


def float8(device: str, small: bool) -> Iterator[Line]:
    """Compiled float8 against compiled bfloat16."""
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        yield skipped("float8", "needs a GPU of compute capability 8.9")
        return
    config, rows = (TINY, SMALL_ROWS) if small else (SHORT, ROWS)
    seconds = {}
    for kind in ("none", "tensorwise", "rowwise"):
        with training_step(config, rows, device, compile="true", float8=kind, **BF16) as step:
            seconds[kind] = step.seconds(6, 4)
    for kind in ("tensorwise", "rowwise"):
        yield at_least(f"{kind}: bfloat16 / float8 step time", seconds["none"] / seconds[kind], 1.0)


def nf4(device: str, small: bool) -> Iterator[Line]:
    """Unpacking of 4-bit weights, and a QLoRA step against a LoRA step."""
    place, size = torch.device(device), 256 if small else 8192
    weight = torch.randn(size, size, device=place)
    packed_weight = pack(weight)
    if device == "cuda":
        pairs = level_pairs(place)
        taken = _seconds(lambda: unpack(packed_weight, size, pairs, torch.bfloat16), place)
        yield at_least("unpack: TB/s", 2.56 * size * size / taken / 1e12, 1.0)
    config = TINY if small else {**LLAMA_1B, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128,
                                 "num_hidden_layers": 8}  # fmt: skip
    rows = SMALL_ROWS if small else Shape(4096, 2, 1, 1)
    seconds = {}
    for peft in ("lora", "qlora"):
        with training_step(config, rows, device, peft=peft, compile="true", **BF16) as step:
            seconds[peft] = step.seconds(6, 4)
    yield at_most("QLoRA / LoRA step time", seconds["qlora"] / seconds["lora"], 1.1, speed=True)


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Return the seconds of a call, after three calls for warm-up."""
    for _ in range(3):
        run()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - began) / repeats
