"""Gradients of whole models after one step, against transformers' own model in float64 on the CPU.

The reference runs each document by itself, in plain PyTorch (components/planning/parity_reference.py). The loss of
random weights is ln(vocabulary) whatever attention computes, so gradients are compared, of models whose attention
scores are large. Two gradients must be zeros: of tokens that occur only in documents without targets, and of tokens
that are only the last of a document. Any attention across documents or to later tokens shows there, in each dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from components import data
from components.batch import Batch
from components.config.compute_rules import torch_problems
from components.config.schema import ParallelismConfig, PeftConfig
from components.config.schema.model import DType
from components.config.schema.optimizer import Schedule
from components.models import quantization
from components.planning.parity_reference import Hyperparameters, Sample, compute_in_float64, reference
from scripts._gpu.kernels import LEAK_BOUND, error
from scripts._gpu.step import SINGLE, TINY, Shape, TrainingStep, dataset, training_step
from scripts._gpu.verdict import Line, at_most, attempt, control, failed, skipped

LLAMA: dict[str, Any] = {**TINY, "hidden_size": 256, "head_dim": 64, "initializer_range": 0.08}
"""Weights so large that attention is far from uniform, but not so large that it is one-hot."""
GEMMA3: dict[str, Any] = {
    **LLAMA, "model_type": "gemma3_text", "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    **TINY, "initializer_range": 0.2, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 4, "moe_intermediate_size": 64,
}  # fmt: skip
"""Each token goes to every expert: rounding cannot change the choice."""
_GPT_OSS: dict[str, Any] = {
    **TINY, "initializer_range": 0.2, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 4, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    **TINY, "initializer_range": 0.2, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "num_hidden_layers"}, "initializer_range": 0.2,
    "model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention"], "head_dim": 16,
    "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 64,
}  # fmt: skip
_LFM2: dict[str, Any] = {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
"""Layers of linear attention, of Mamba-2 and of short convolutions beside attention."""
FLOAT32: dict[str, Any] = {"dtype": DType.float32, "compute_dtype": DType.float32}
MIXED: dict[str, Any] = {"dtype": DType.float32, "compute_dtype": DType.bfloat16}
BF16: dict[str, Any] = {"dtype": DType.bfloat16, "compute_dtype": DType.bfloat16}
FLOAT64: dict[str, Any] = {"dtype": DType.float64, "compute_dtype": DType.float64}
PACKED = Shape(tokens=256, rows=2, micro_batches=2)
UNPACKED = replace(PACKED, pack=False, tokens=160)
LENGTHS = (40, 97, 13, 128, 60, 1, 30)
COMMON, ONLY_SILENT, ONLY_LAST = (1, 200), (200, 228), (228, 256)
"""Ranges of token ids: of any position; of documents without targets; of the last position of a document."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained."""

    label: str
    config: dict[str, Any]
    dtypes: dict[str, Any]
    bound: float
    """Largest relative error of any parameter's gradient."""
    peft: str = "none"
    shape: Shape = PACKED
    options: dict[str, Any] = field(default_factory=dict)
    """Further keys of the model section, and `parallelism`."""
    gpu_only: bool = False


def mesh(**keys: Any) -> dict[str, Any]:
    return {"parallelism": {**SINGLE, **keys}}


COMPILED, EAGER = {"compile": "true"}, {"attention": "eager"}
CASES = (
    Case("Llama, float32", LLAMA, FLOAT32, 1e-4),
    Case("Llama, mixed", LLAMA, MIXED, 6e-2),
    Case("Llama, bfloat16", LLAMA, BF16, 8e-2),
    Case("Llama, not packed, mixed", LLAMA, MIXED, 6e-2, shape=UNPACKED),
    Case("Llama, fused layers, mixed", LLAMA, MIXED, 6e-2, options={"fused": "all"}),
    Case("Llama, compiled, mixed", LLAMA, MIXED, 6e-2, options=COMPILED),
    Case("Llama, compiled, not packed, mixed", LLAMA, MIXED, 6e-2, shape=UNPACKED, options=COMPILED),
    Case("Llama, fsdp2, mixed", LLAMA, MIXED, 6e-2, options=mesh(strategy="fsdp2")),
    Case("Llama, fsdp2, compiled, mixed", LLAMA, MIXED, 6e-2, options={**COMPILED, **mesh(strategy="fsdp2")}),
    Case("Llama, full recompute, mixed", LLAMA, MIXED, 6e-2, options=mesh(activation_checkpointing="full")),
    Case("Llama, selective recompute, mixed", LLAMA, MIXED, 6e-2, options=mesh(activation_checkpointing="selective")),
    Case("Gemma 3, float32", GEMMA3, FLOAT32, 1e-4),
    Case("Gemma 3, mixed", GEMMA3, MIXED, 6e-2),
    Case("Gemma 3, compiled, mixed", GEMMA3, MIXED, 6e-2, options=COMPILED),
    Case("Qwen3 MoE, float32", QWEN3_MOE, FLOAT32, 1e-4),
    Case("Qwen3 MoE, mixed", QWEN3_MOE, MIXED, 6e-2),
    Case("gpt-oss, float32", _GPT_OSS, FLOAT32, 1e-4, options=EAGER),
    Case("gpt-oss, mixed", _GPT_OSS, MIXED, 1.5e-1, options=EAGER),
    Case("DeepSeek V3, float32", DEEPSEEK_V3, FLOAT32, 1e-4),
    Case("DeepSeek V3, mixed", DEEPSEEK_V3, MIXED, 6e-2),
    Case("Qwen3.5, float32", QWEN3_5, FLOAT32, 1e-4),
    Case("Qwen3.5, mixed", QWEN3_5, MIXED, 1e-1),
    Case("Qwen3.5, compiled, mixed", QWEN3_5, MIXED, 1e-1, options=COMPILED),
    Case("Nemotron-H, float32", NEMOTRON_H, FLOAT32, 1e-4),
    Case("Nemotron-H, mixed", NEMOTRON_H, MIXED, 6e-2),
    Case("LFM2, mixed", _LFM2, MIXED, 6e-2),
    Case("Llama, LoRA, mixed", LLAMA, MIXED, 8e-2, "lora"),
    Case("Llama, LoRA, compiled, bfloat16", LLAMA, BF16, 8e-2, "lora", options=COMPILED),
    Case("Llama, QLoRA, float32", LLAMA, FLOAT32, 1e-4, "qlora"),
    Case("Llama, QLoRA, compiled, mixed", LLAMA, MIXED, 8e-2, "qlora", options=COMPILED),
    Case("Llama, QLoRA, fsdp2, mixed", LLAMA, MIXED, 8e-2, "qlora", options=mesh(strategy="fsdp2")),
    Case("Llama, offloaded activations, mixed", LLAMA, MIXED, 6e-2, options=mesh(activation_offload=True),
         gpu_only=True),
    Case("Llama, fsdp2, cpu_offload, mixed", LLAMA, MIXED, 6e-2, options=mesh(strategy="fsdp2", cpu_offload=True),
         gpu_only=True),
)  # fmt: skip
REHEARSED = ("Llama, compiled, mixed", "Llama, QLoRA, compiled, mixed")
"""Compiled cases that also run in a rehearsal; compilation takes most of its time."""
CONTROLLED = tuple(
    f"{name}, {dtypes}" for name in ("Llama", "Gemma 3", "Qwen3.5", "Nemotron-H") for dtypes in ("float32", "mixed")
)
"""Cases in which each fault is planted."""


def gradients(device: str, small: bool) -> Iterator[Line]:
    """Every parameter's gradient in each setting, and the same of planted faults."""
    for case in CASES:
        rehearsed = case.label in REHEARSED or "compile" not in case.options
        if device == "cuda" or (rehearsed and not case.gpu_only):
            yield from attempt(case.label, compared(case, device))


def steps(device: str, small: bool) -> Iterator[Line]:
    """Losses of five optimizer steps in float64: everything but the kernels of 16 bits."""
    cases = [
        Case("Llama", LLAMA, FLOAT64, 1e-10),
        Case("Llama, not packed", LLAMA, FLOAT64, 1e-10, shape=UNPACKED),
        Case("Gemma 3", GEMMA3, FLOAT64, 1e-10),
        Case("Qwen3 MoE", QWEN3_MOE, FLOAT64, 1e-10),
        Case("DeepSeek V3", DEEPSEEK_V3, FLOAT64, 1e-10),
        Case("Qwen3.5", QWEN3_5, FLOAT64, 1e-10),
        Case("Llama, fsdp2", LLAMA, FLOAT64, 1e-10, options=mesh(strategy="fsdp2")),
        Case("Llama, ddp", LLAMA, FLOAT64, 1e-10, options=mesh(strategy="ddp")),
        Case("Llama, full recompute", LLAMA, FLOAT64, 1e-10, options=mesh(activation_checkpointing="full")),
        Case("Llama, LoRA", LLAMA, FLOAT64, 1e-10, "lora"),
    ]
    if device == "cuda":
        offload = mesh(activation_offload=True)
        cases.append(Case("Llama, offloaded activations", LLAMA, FLOAT64, 1e-10, options=offload))
    for case in cases:
        yield from attempt(case.label, _curves(case, device))


def _curves(case: Case, device: str, count: int = 5) -> Iterator[Line]:
    with step_of(case, device, lr=1e-3) as step:
        model = reference_model(case)
        copy_weights(model, step)
        expected = reference(
            model, lambda number: _samples(step.batches.at(number)), _hyperparameters(step, count)
        ).losses
        found = step.curve(count)
    difference = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
    yield at_most(f"{case.label}: largest relative difference of {count} losses", difference, case.bound)
    first = max(abs(each / expected[0] - 1) for each in expected[1:])
    yield control(f"{case.label}, weights that stay as they are", first, case.bound)


def compared(case: Case, device: str) -> Iterator[Line]:
    """Yield the worst gradient of a case, gradients that must be zeros, and the same of each planted fault."""
    axes = ParallelismConfig(**case.options.get("parallelism", SINGLE))
    if problems := torch_problems(PeftConfig(method=case.peft), axes, axes.resolve(1)):  # type: ignore[arg-type]
        yield skipped(case.label, problems[0])
        return
    with step_of(case, device, lr=1e-30) as step:  # weights stay as they are
        model = reference_model(case)
        copy_weights(model, step)
        batches = step.batches.at(0)
        curve = reference(model, lambda _: _samples(batches), _hyperparameters(step, 1))
        expected = {_own_name(name): gradient for name, gradient in curve.gradients.items()}
        loss, found = _gradients(step, batches)
        if expected.keys() != found.keys():
            yield failed(f"{case.label}: parameters with a gradient", str(sorted(expected.keys() ^ found.keys())[:3]))
        name = max(expected, key=lambda each: error(found[each], expected[each]))
        yield at_most(f"{case.label}: worst gradient, of {name}", error(found[name], expected[name]), case.bound)
        difference = abs(loss / curve.losses[0] - 1)
        yield at_most(f"{case.label}: loss", difference, min(1e-2, case.bound))
        if case.peft == "none":
            yield at_most(f"{case.label}: gradients that must be zeros", _leak(found), LEAK_BOUND)
        if case.label in CONTROLLED:
            for fault, planted in FAULTS.items():
                # No gradient that must be zero shows it, and the bound of float32 is the tight one. Nemotron-H has no
                # positions.
                if fault == SHIFTED and (case.dtypes is not FLOAT32 or case.config is NEMOTRON_H):
                    continue
                with planted(step, batches) as changed:
                    _, wrong = _gradients(step, changed)
                yield _control_line(f"{case.label}, {fault}", wrong, expected, case.bound)


def _control_line(what: str, wrong: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> Line:
    """Return the line of a fault: of the two bounds, the one that it exceeds by more counts."""
    zero = torch.zeros(())
    worst = max(error(wrong.get(name, zero.expand_as(right)), right) for name, right in expected.items())
    leak = _leak(wrong)
    if leak / LEAK_BOUND > worst / bound:
        return control(f"{what}: gradients that must be zeros", leak, LEAK_BOUND)
    return control(f"{what}: worst gradient", worst, bound)


def _leak(found: dict[str, torch.Tensor]) -> float:
    """Return the share of the embedding's gradient at tokens whose gradient must be zeros."""
    gradient = next(each for name, each in found.items() if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    zeros = gradient[ONLY_SILENT[0] : ONLY_LAST[1]]
    return (zeros.norm() / gradient.norm()).item()


@contextmanager
def step_of(case: Case, device: str, lr: float) -> Iterator[TrainingStep]:
    options = {"router_aux_coef": 0.0} if {"num_experts", "num_local_experts"} & case.config.keys() else {}
    with training_step(
        case.config, case.shape, device, peft=case.peft, lr=lr, rows=_rows(case.shape), **options, **case.dtypes,
        **case.options,
    ) as step:  # fmt: skip
        yield step


def _rows(shape: Shape) -> Any:
    """Return rows with documents of LENGTHS, every third without targets, whose tokens are of the ranges above."""
    generator = torch.Generator().manual_seed(1)

    def draw(ids: tuple[int, int], count: int) -> list[int]:
        return torch.randint(*ids, (count,), generator=generator).tolist()

    examples = []
    for index in range(84):
        length, silent = LENGTHS[index % len(LENGTHS)], index % 3 == 1
        tokens = draw(ONLY_SILENT if silent else COMMON, length)
        tokens[-1:] = draw(ONLY_SILENT if silent else ONLY_LAST, 1)
        examples.append(data.Example(tokens, [-100] * length if silent else list(tokens)))
    return dataset(examples, shape)


def _samples(batches: list[Batch]) -> list[Sample]:
    """Return (tokens, labels) of each document of the micro-batches."""
    samples = []
    for batch in batches:
        for row in range(batch.shape[0]):
            ends = [0, batch.shape[1]] if batch.document_bounds is None else batch.document_bounds[row].tolist()
            for start, end in zip(ends, ends[1:], strict=False):
                if end > start:
                    targets = batch.targets[row, start : end - 1]
                    labels = torch.cat([torch.full((1,), -100), targets])
                    samples.append((batch.input_ids[row, start:end], labels))
    return samples


def _hyperparameters(step: TrainingStep, count: int) -> Hyperparameters:
    optimizer = replace(step.cfg.optimizer, schedule=Schedule.constant)
    return Hyperparameters(optimizer, count, count, step.cfg.training.max_grad_norm)  # type: ignore[arg-type]


@cache
def _weights(config: tuple[tuple[str, Any], ...]) -> dict[str, torch.Tensor]:
    """Return random weights in float64 that bfloat16 holds exactly, by name."""
    torch.manual_seed(0)
    model = _transformers_model(dict(config))
    weights = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach() + (0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
        weights[name] = values.bfloat16().double()
    return weights


def _transformers_model(config: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
    built = AutoConfig.for_model(values.pop("model_type"), **values)
    attention = "eager" if built.model_type == "gpt_oss" else "sdpa"  # it has no other
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float64, attn_implementation=attention)
    compute_in_float64(model)
    return model


def reference_model(case: Case) -> nn.Module:
    """Return transformers' model in float64, with PEFT's adapters, whose second factor is not zero."""
    model = _transformers_model(case.config)
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in case.config.items()}
    weights = dict(_weights(tuple(frozen.items())))
    model.load_state_dict(weights, strict=False)
    if case.peft == "none":
        return model.train()
    from peft import LoraConfig, get_peft_model

    chosen = PeftConfig()
    adapters = LoraConfig(r=chosen.rank, lora_alpha=int(chosen.alpha), target_modules="all-linear")
    adapted = get_peft_model(model, adapters)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.05, generator=generator)
            elif case.peft == "qlora" and ".base_layer." in name:
                packed = quantization.pack(parameter.float())
                parameter.copy_(
                    quantization.unpack(packed, parameter.shape[1], quantization.level_pairs(), torch.float32)
                )
    return adapted.train()


def _own_name(name: str) -> str:
    """Return Meshbook's name of a parameter of a PEFT model."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return name.replace(".lora_A.default.weight", ".lora_A").replace(".lora_B.default.weight", ".lora_B")


@torch.no_grad()
def copy_weights(model: nn.Module, step: TrainingStep) -> None:
    """Copy the reference's weights into the prepared model, sharded over one rank or not."""
    values = {_own_name(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in step.model.module.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        value = values[name].float() if quantization.is_packed(local) else values[name]
        local.copy_(quantization.pack(value) if quantization.is_packed(local) else value)


def _gradients(step: TrainingStep, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and each parameter's gradient before clipping, of a step that does not change the weights."""
    from components import training

    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            found[name] = local.detach().double().cpu().clone()

        return hook

    named = [(name, each) for name, each in step.model.module.named_parameters() if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(keep(name)) for name, each in named]
    loss = training.train_step(step.model, batches, step.optimizer)["loss"].item()
    for handle in handles:
        handle.remove()
    return loss, found


Plant = Callable[[TrainingStep, list[Batch]], Any]
"""(step, its micro-batches) -> context manager of the micro-batches with a fault."""


def _changed_batches(change: Callable[[Batch], Batch]) -> Plant:
    @contextmanager
    def planted(step: TrainingStep, batches: list[Batch]) -> Iterator[list[Batch]]:
        yield [change(batch) for batch in batches]

    return planted


def _changed_attention(attend: Callable[..., torch.Tensor]) -> Plant:
    @contextmanager
    def planted(step: TrainingStep, batches: list[Batch]) -> Iterator[list[Batch]]:
        from transformers import AttentionInterface

        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
            options["documents"].used = True
            groups = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
            return attend(query, key, value).transpose(1, 2), None

        model = step.model.module
        before = model.config._attn_implementation
        AttentionInterface.register("planted_fault", attention)
        model.set_attn_implementation("planted_fault")
        yield batches
        model.set_attn_implementation(before)

    return planted


def _whole_rows(batch: Batch) -> Batch:
    bounds = batch.document_bounds.clone()  # type: ignore[union-attr]
    bounds[:, 1:] = batch.shape[1]
    return replace(batch, document_bounds=bounds, longest_document=batch.shape[1])


def _one_border_less(batch: Batch) -> Batch:
    bounds: Any = batch.document_bounds
    merged = torch.cat([bounds[:, :1], bounds[:, 2:], bounds[:, -1:]], 1)
    return replace(batch, document_bounds=merged, longest_document=batch.shape[1])


def _shifted_positions(batch: Batch) -> Batch:
    """Move the second half of each row's positions by one; a shift of whole documents would change nothing."""
    positions: Any = batch.position_ids
    return replace(batch, position_ids=positions + (positions % 16 >= 8))


SHIFTED = "positions shifted"
FAULTS: dict[str, Plant] = {
    "documents ignored": _changed_batches(_whole_rows),
    "a border dropped": _changed_batches(_one_border_less),
    SHIFTED: _changed_batches(_shifted_positions),
    "future visible": _changed_attention(nn.functional.scaled_dot_product_attention),
    "each token sees only itself": _changed_attention(lambda q, k, v: v.to(q.dtype)),
}
"""Faults of attention, each of which passed the checks of losses that were here before."""
