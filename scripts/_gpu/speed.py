"""Speed, memory and host syncs of whole steps as `auto` configures them, a bare PyTorch loop beside them, and parts."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from components import training
from components.config.compute_rules import torch_problems
from components.config.schema import ParallelismConfig, PeftConfig
from components.config.shape import shape_of_built
from components.models.attention import AttentionProbe, choose_kernel, measure_kernels, observed_call
from components.models.quantization import level_pairs, pack, unpack
from components.planning.formulas.architecture import read_architecture
from components.planning.formulas.memory import estimate_memory
from components.planning.formulas.workload import build_workload
from components.training.objectives import PLAIN
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.preparation import RecomputePolicy
from scripts._gpu.gradients import BF16, GEMMA3
from scripts._gpu.step import LLAMA_1B, LLAMA_8B, SINGLE, TINY, Shape, TrainingStep, synchronize, training_step
from scripts._gpu.verdict import Line, Verdict, at_least, at_most, attempt, failed, skipped

PREDICTED = {
    "full_1b": {"H200": 60_772, "H100": 53_066},
    "lora_8b": {"H200": 14_678, "H100": 12_927},
    "qlora_8b": {"H200": 14_854, "H100": 13_128},
}
"""Predicted tokens/s of a check by device: the column "by auto" of docs/gpu_counts.md."""
DEFAULT: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": -1}
"""The default option of the `parallelism` group."""
SHORT = {**LLAMA_1B, "num_hidden_layers": 8}
ROWS = Shape(tokens=4096, rows=4, micro_batches=2, documents=1)
SMALL_ROWS = Shape(tokens=64, rows=2, micro_batches=2, documents=1)
GIB = 2**30


def full_1b(device: str, small: bool) -> Iterator[Line]:
    """All parameters of 1B, packed rows of one document and of 16."""
    yield from _as_configured("full_1b", TINY if small else LLAMA_1B, "none", SMALL_ROWS if small else ROWS, device)


def lora_8b(device: str, small: bool) -> Iterator[Line]:
    """LoRA adapters of 8B."""
    rows = SMALL_ROWS if small else replace(ROWS, rows=2, micro_batches=1)
    yield from _as_configured("lora_8b", TINY if small else LLAMA_8B, "lora", rows, device)


def qlora_8b(device: str, small: bool) -> Iterator[Line]:
    """LoRA adapters of 8B over weights in 4 bits, and the speed of unpacking them."""
    rows = SMALL_ROWS if small else replace(ROWS, rows=2, micro_batches=1)
    yield from _as_configured("qlora_8b", TINY if small else LLAMA_8B, "qlora", rows, device)
    if device == "cuda":
        weight = pack(torch.randn(8192, 8192, device=device))
        pairs = level_pairs(device)
        taken = _seconds(lambda: unpack(weight, 8192, pairs, torch.bfloat16), torch.device(device))
        yield at_least("unpacking: TB/s", 2.56 * 8192**2 / taken / 1e12, 1.0)


def _as_configured(stage: str, config: dict[str, Any], peft: str, rows: Shape, device: str) -> Iterator[Line]:
    """Yield the figures of a model that is configured by the defaults of the recipes."""
    began, mesh, default = time.perf_counter(), DEFAULT, ParallelismConfig(**DEFAULT)
    if problems := torch_problems(PeftConfig(method=peft), default, default.resolve(1)):  # type: ignore[arg-type]
        yield Line("parallelism=ddp", problems[0])
        mesh = {**DEFAULT, "strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
    with training_step(config, rows, device, parallelism=mesh, peft=peft, compile="auto") as step:
        for line in training.check_kernels(step.model, step.cfg.model, step.batches.at):
            yield Line("chosen", line)
        synchronize(step.device)
        yield Line("chosen", "; ".join(filter(None, map(str, step.model.notes))) or "nothing")
        yield Line("seconds to build", f"{time.perf_counter() - began:.1f}")
        planned = planned_peak(step)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        first = step.run(1)["loss"].item()
        yield Line("seconds of the first step", f"{time.perf_counter() - began:.1f}")
        seconds = step.seconds(6, 3)
        yield rate("tokens/s", step.tokens / seconds, PREDICTED[stage])
        numbers = step.run(1)
        at_peak, last = numbers["seconds_at_peak"].item(), numbers["loss"].item()
        yield Line("MFU", f"{at_peak / seconds:.3f}" if at_peak else "unknown for this device")
        yield at_most("loss, last / first", last / first, 1.05)
        if device == "cuda":
            yield from _peaks(planned)
            yield _sync_free(step, "host syncs in two steps")
        if peft == "none":
            step.use_rows(replace(rows, documents=16))
            yield Line("tokens/s, 16 documents a row", f"{step.tokens / step.seconds(4, 3):,.0f}")
            if device == "cuda":
                yield _busy(step)


def rate(what: str, value: float, predictions: dict[str, int]) -> Line:
    """Return the line of tokens/s, SLOW below 85 % of the prediction for this device."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    predicted = next((value for key, value in predictions.items() if key in name), None)
    if predicted is None:
        return Line(what, f"{value:,.0f}")
    verdict = at_least(what, value / predicted, 0.85).verdict
    return Line(what, f"{value:,.0f}", "at least 85 % of the prediction", verdict, f"{predicted:,}")


def _peaks(planned: int) -> Iterator[Line]:
    """Yield the planner's peak against the allocator's since its statistics were reset."""
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    line = at_most("peak memory, planned against allocated, relative", abs(planned / peak - 1), 0.10)
    yield replace(line, measured=f"{peak / GIB:.2f} GiB", predicted=f"{planned / GIB:.2f} GiB ({line.measured})")
    yield at_most("memory reserved / allocated", reserved / peak, 1.1, speed=True)


def planned_peak(step: TrainingStep) -> int:
    """Return the planner's estimate of a step's peak memory in bytes, under the policies that `auto` chose."""
    prepared, config = step.model, step.model.module.config.to_dict()
    policy = next((note.policy for note in prepared.notes if isinstance(note, RecomputePolicy)), None)
    parallelism = prepared.parallelism
    if policy is not None:
        parallelism = replace(parallelism, activation_checkpointing=policy)
    cfg = replace(step.cfg, parallelism=parallelism)
    on_gpu, memory = step.device.type == "cuda", None
    if on_gpu:
        memory = torch.cuda.get_device_properties(step.device).total_memory
    architecture = read_architecture(shape_of_built(config), config["model_type"])
    workload = build_workload(
        cfg, parallelism.resolve(1), on_gpu=on_gpu, architecture=architecture, device_memory=memory
    )  # fmt: skip
    return int(estimate_memory(workload, step.device.type).peak)


def _sync_free(step: TrainingStep, what: str) -> Line:
    """Return the line of two steps in which a host sync raises."""
    steps = [step.batches.at(index) for index in range(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batches in steps:
            training.train_step(step.model, batches, step.optimizer)
    except RuntimeError as error:
        return failed(what, str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Line(what, "0", "0")


def _busy(step: TrainingStep) -> Line:
    """Return the share of the wall time of two steps during which a kernel runs; print the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    synchronize(step.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        began = time.perf_counter()
        step.run(2)
        synchronize(step.device)
        wall = time.perf_counter() - began
    spans = sorted((e.time_range.start, e.time_range.end) for e in recorded.events() if e.device_type.name == "CUDA")
    total, reached = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    print(recorded.key_averages().table(sort_by="self_device_time_total", row_limit=25))
    return at_least("share of the wall time with a running kernel", total / 1e6 / wall, 0.95)


def bare_loop(device: str, small: bool) -> Iterator[Line]:
    """A bare PyTorch loop over transformers' model, in the sizes and dtypes of full_1b."""
    for compiled in (False, True):
        label = "layers compiled" if compiled else "not compiled"
        yield from attempt(label, _bare_loop(label, compiled, device, small))


def _bare_loop(label: str, compiled: bool, device: str, small: bool) -> Iterator[Line]:
    from transformers import AutoConfig, AutoModelForCausalLM

    values, rows = dict(TINY if small else LLAMA_1B), SMALL_ROWS if small else ROWS
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    model.config.use_cache = False
    for layer in model.model.layers if compiled else ():
        layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    shape = rows.micro_batches, rows.rows, rows.tokens
    ids = torch.randint(1, config.vocab_size, shape, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        for each in ids:
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = model(input_ids=each).logits[:, :-1].float()
            targets = each[:, 1:].flatten()
            (F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / ids.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _seconds(step, torch.device(device), repeats=5)
    yield Line(f"{label}: tokens/s", f"{ids.numel() / seconds:,.0f}")
    if device == "cuda":
        yield Line(f"{label}: peak memory", f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB")
        del model, optimizer
        torch.cuda.empty_cache()


def memory(device: str, small: bool) -> Iterator[Line]:
    """The planner's peak against the allocator's, with three policies of activation checkpointing."""
    config = {**LLAMA_1B, "num_hidden_layers": 4 if small else 16}
    rows = Shape(512 if small else 8192, 1, 2, 4)
    for policy in ("none", "selective", "full"):
        axes = {**SINGLE, "activation_checkpointing": policy}
        with training_step(config, rows, device, parallelism=axes, **BF16) as step:
            torch.cuda.reset_peak_memory_stats()
            step.run(3)
            torch.cuda.synchronize()
            for line in _peaks(planned_peak(step)):
                yield replace(line, what=f"{policy}: {line.what}")


def compiled(device: str, small: bool) -> Iterator[Line]:
    """Compiled layers against eager ones, and the number of graphs for rows of many lengths."""
    if not small:
        seconds = {}
        for compile_layers in ("false", "true"):
            with training_step(SHORT, ROWS, device, compile=compile_layers, **BF16) as step:
                seconds[compile_layers] = step.seconds(6, 3)
        yield at_least("eager / compiled step time", seconds["false"] / seconds["true"], 1.15)
    lengths = Shape(tokens=64, rows=2, pack=False, lengths=(10, 24, 64, 33, 48, 17))
    models = (("Llama", TINY, "none"), ("Gemma 3 with adapters", GEMMA3, "lora"))
    for name, config, peft in models[:1] if small else models:
        torch._dynamo.reset()
        before = _graphs()
        with training_step(config, lengths, device, peft=peft, compile="true", **BF16) as step:
            step.run(3)
            first = _graphs() - before
            step.run(6)
        yield at_least(f"{name}, rows of six lengths: graphs of the first steps", first, 1, speed=False)
        yield at_most(f"{name}, rows of six lengths: graphs after step 3", _graphs() - before - first, 2)


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
    expected = [leaf.grad for leaf in leaves]
    heads = {"eager": Head()} if small else {"eager": Head(), "compiled": Head(compiled=True)}
    for name, head in heads.items():
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]

        def whole(head: Head = head, leaves: list[torch.Tensor] = leaves) -> None:
            leaves[0].grad = leaves[1].grad = None
            linear_token_loss(*leaves, None, Targets(ids, tokens), head, PLAIN.token_loss).backward()  # type: ignore[misc]

        taken = _seconds(whole, place)
        for what, got, exact in zip(("hidden states", "weight"), leaves, expected, strict=True):
            worst = ((got.grad - exact).norm() / exact.norm()).item()  # type: ignore[union-attr, operator]
            yield at_most(f"{name}: relative error of the gradient of the {what}", worst, 1e-2)
        what, bound = f"{name}: time / time of three matrix products", 1.3 if name == "compiled" else 2.0
        ratio = at_most(what, taken / products, bound, speed=True)
        yield replace(ratio, bound="-", verdict=Verdict.PASS) if small else ratio


def attention(device: str, small: bool) -> Iterator[Line]:
    """TFLOP/s of forward and backward of the installed kernels at two lengths, and the kernel that a run would use."""
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
            rates = measure_kernels(observed_call(*probe.first), default)
            for name, rate in rates.items():
                yield Line(
                    f"{tokens:,} tokens, {what}, {name}", rate if isinstance(rate, str) else f"{rate:,.0f} TFLOP/s"
                )
            chosen, _ = choose_kernel(rates, default)
            yield Line(f"{tokens:,} tokens, {what}: torch uses {default}, runs use", chosen)


def float8(device: str, small: bool) -> Iterator[Line]:
    """Compiled float8 against compiled bfloat16."""
    if torch.cuda.get_device_capability() < (8, 9):
        yield skipped("float8", "needs a GPU of compute capability 8.9")
        return
    if importlib.util.find_spec("torchao") is None:
        yield skipped("float8", "needs the extra quantization (torchao)")
        return
    config, rows = (TINY, SMALL_ROWS) if small else (SHORT, ROWS)
    seconds = {}
    for kind in ("none", "tensorwise", "rowwise"):
        with training_step(config, rows, device, compile="true", float8=kind, **BF16) as step:
            seconds[kind] = step.seconds(6, 4)
    for kind in ("tensorwise", "rowwise"):
        yield at_least(f"{kind}: bfloat16 / float8 step time", seconds["none"] / seconds[kind], 1.0)


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
