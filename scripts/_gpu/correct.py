"""Checks of correctness: the numbers of a CPU, packed rows, host syncs, the planner's memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from components import training
from components.config.schema.model import DType
from components.config.schema.parallelism import Strategy
from components.models.documents import Documents
from scripts._gpu.step import GEMMA3, LLAMA_1B, QWEN3_MOE, TINY, Shape, TrainingStep, training_step
from scripts._gpu.verdict import Line, at_most, failed, skipped

FLOAT32: dict[str, Any] = {"dtype": DType.float32, "compute_dtype": DType.float32}
MIXED: dict[str, Any] = {"dtype": DType.float32, "compute_dtype": DType.bfloat16}
BF16: dict[str, Any] = {"dtype": DType.bfloat16, "compute_dtype": DType.bfloat16}
STEPS = 20
GIB = 2**30


def parity(device: str, small: bool) -> Iterator[Line]:
    """20 steps of small models: float32 against a CPU, and bfloat16 against float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape, steps = Shape(tokens=64, rows=4, micro_batches=2), STEPS // 5 if small else STEPS
    for name, config in (("Llama", TINY), ("Gemma 3", GEMMA3), ("Qwen3 MoE", QWEN3_MOE)):
        with training_step(config, shape, "cpu", **FLOAT32) as on_cpu:
            weights = {key: value.clone() for key, value in on_cpu.model.module.state_dict().items()}
            expected = on_cpu.curve(steps)
        for label, values, bound in (("float32", FLOAT32, 1e-5), ("bfloat16", MIXED, 2e-2)):
            with training_step(config, shape, device, **values) as here:
                here.model.module.load_state_dict(weights)
                found = here.curve(steps)
            yield at_most(f"{name}, {label}, largest relative difference of the loss", _worst(found, expected), bound)


def packed(device: str, small: bool) -> Iterator[Line]:
    """Packed rows against their documents one by one, in bfloat16, and the kernel that attends."""
    for strategy in (Strategy.single, Strategy.fsdp2):
        curves, kernel = [], ""
        for pack in (True, False):
            shape = Shape(tokens=64 if pack else 32, rows=2 if pack else 4, documents=2 if pack else 1, pack=pack)
            with training_step(TINY, shape, device, strategy, **MIXED) as step:
                if pack:
                    (kernel, *_) = training.check_kernels(step.model, _model_config(), step.batches.at)
                curves.append(step.curve(1))
        yield at_most(f"{strategy}: relative difference of the first loss", _worst(*curves), 1e-2)
        if device == "cuda" and "varlen" not in kernel:
            yield failed(f"{strategy}: kernel", f"not the kernel for documents: {kernel}")
        else:
            yield Line(f"{strategy}: kernel", kernel)
    if device == "cuda":
        yield at_most("keys of other ranks (cp): relative error", gathered_keys_error(device, torch.bfloat16), 1e-2)


def gathered_keys_error(device: str, dtype: torch.dtype) -> float:
    """Return the largest relative error of the variable-length kernel where queries are a part of a packed row.

    Compares the output and the gradients with attention under a mask in float32 or wider. Of keys in documents without
    queries, the gradients must be zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    start, end, first, width = 64, 128, 16, 64
    documents = Documents(torch.tensor([[0, 40, 100, 101, 160]], dtype=torch.int32, device=device))
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(tokens, heads, width, generator=generator).to(device, dtype).requires_grad_()
        for tokens, heads in ((end - start, 4), (end - first, 2), (end - first, 2), (end - start, 4))
    )
    query_ends, key_ends = documents.chunk_ends(start, end, first)
    output: Any = varlen_attn(
        query, key, value, query_ends, key_ends, end - start, end - first, window_size=(-1, 0), enable_gqa=True
    )
    leaves = query, key, value
    found = [output, *torch.autograd.grad(output, leaves, grad)]
    wide = [each.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for each in leaves]
    heads_first = [wide[0].transpose(0, 1), *(each.repeat_interleave(2, dim=1).transpose(0, 1) for each in wide[1:])]
    mask = documents.mask(160, None)[0, 0, start:end, first:end]
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(0, 1)
    expected = [exact, *torch.autograd.grad(exact, wide, grad.to(exact.dtype))]
    return max(
        ((got - want).norm() / want.norm()).item() for got, want in zip(found, expected, strict=True)
    )  # fmt: skip


def syncs(device: str, small: bool) -> Iterator[Line]:
    """Three steps in which a host that waits for the device raises an error."""
    if device != "cuda":
        yield skipped("no host sync in a step", "needs a GPU")
        return
    for strategy in (Strategy.single, Strategy.fsdp2):
        for peft in ("none", "lora", "qlora"):
            with training_step(TINY, Shape(micro_batches=2), device, strategy, peft, **MIXED) as step:
                step.run(2)  # the first steps create the optimizer's state
                yield _sync_free(step, f"{strategy}, peft={peft}: host syncs in three steps")


def _sync_free(step: TrainingStep, what: str) -> Line:
    """Return the line of three steps in which a host sync raises."""
    steps = [step.batches.at(index) for index in range(3)]
    torch.cuda.synchronize()
    try:
        with _syncs_raise():
            for batches in steps:
                training.train_step(step.model, batches, step.optimizer)
    except RuntimeError as error:
        return failed(what, str(error).splitlines()[0])
    return Line(what, "0", "0")


def memory(device: str, small: bool) -> Iterator[Line]:
    """The planner's peak against the allocator's, with three policies of activation checkpointing."""
    if device != "cuda":
        yield skipped("peak memory", "needs a GPU")
        return
    tokens = 512 if small else 8192
    for policy in ("none", "selective", "full"):
        config = {**LLAMA_1B, "num_hidden_layers": 4 if small else 16}
        with training_step(config, Shape(tokens, 1, 2, 4), device, policy=policy, **BF16) as step:
            planned = _planned_peak(step, config, tokens, policy)
            torch.cuda.reset_peak_memory_stats()
            step.run(3)
            torch.cuda.synchronize()
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        line = at_most(f"{policy}: planned against allocated, relative", abs(planned / peak - 1), 0.10)
        yield Line(
            line.what, f"{peak / GIB:.2f} GiB", line.bound, line.verdict, f"{planned / GIB:.2f} GiB ({line.measured})"
        )
        yield at_most(f"{policy}: reserved / allocated", reserved / peak, 1.1, speed=True)


def _planned_peak(step: TrainingStep, config: dict[str, Any], tokens: int, policy: str) -> int:
    """Return the planner's estimate, in bytes, for the run that `training_step` builds."""
    from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig
    from components.config.schema.data import DocsDataConfig
    from components.config.schema.model import WeightInit
    from components.config.shape import shape_of_built
    from components.planning.formulas.architecture import read_architecture
    from components.planning.formulas.memory import estimate_memory
    from components.planning.formulas.workload import build_workload

    parallelism = ParallelismConfig(strategy=Strategy.single, dp_shard=1, activation_checkpointing=policy)  # type: ignore[arg-type]
    cfg = FinetuneConfig(
        model=ModelConfig(init=WeightInit.random, tokenizer="bytes", config=dict(config), compile="false", **BF16),
        data=DocsDataConfig(pack=True),
        parallelism=parallelism,
    )
    cfg.training.seq_len, cfg.training.micro_batch_size, cfg.training.global_batch_size = tokens, 1, 2
    built = step.model.module.config.to_dict()
    architecture = read_architecture(shape_of_built(built), config["model_type"])
    mesh = parallelism.resolve(1)
    return int(estimate_memory(build_workload(cfg, mesh, on_gpu=True, architecture=architecture), "cuda").peak)


def _model_config() -> Any:
    from components.config.schema import ModelConfig
    from components.config.schema.model import WeightInit

    return ModelConfig(init=WeightInit.random, tokenizer="bytes", config=dict(TINY), **MIXED)


@contextmanager
def _syncs_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _worst(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; infinity if one is NaN."""
    differences = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    return max((each if each == each else sys.float_info.max) for each in differences)
