"""Levers and layouts of a step on fake CUDA tensors, and what a layer launches, moves and sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from components.planning.formulas.memory import MemoryEstimate, rank_memory
from components.planning.formulas.workload import build_workload
from components.torch_kernels import has_grouped_queries
from tests.gpu_ready.conftest import Run
from tests.gpu_ready.device import MEMORY

Layout = tuple[dict[str, Any], int]
"""The section `parallelism`, and the number of ranks."""

LAYOUTS: dict[str, Layout] = {
    "single": ({"strategy": "single"}, 1),
    "dp_shard": ({"dp_shard": 8}, 8),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 4}, 8),
    "tp": ({"dp_shard": 2, "tp": 2}, 4),
    "tp with sequence parallelism": ({"dp_shard": 2, "tp": 2, "sequence_parallel": True}, 4),
    "cp by ulysses": ({"dp_shard": 2, "cp": 2}, 4),
    "cp by all_gather": ({"dp_shard": 2, "cp": 2, "cp_attention": "all_gather"}, 4),
    "pp": ({"pp": 2, "dp_shard": 2}, 4),
}
EXPERT_LAYOUTS: dict[str, Layout] = {**LAYOUTS, "ep": ({"ep": 2, "dp_shard": 2}, 4)}
SEQ_LEN = 3072
"""Tokens of a row: the size of no weight, so that matrices of all token pairs are recognized."""
ROWS, MICRO_BATCHES = 2, 2
"""Rows of a micro-batch, which are pairs for DPO, and micro-batches of a step."""
SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
"""Layers of Llama 3.2 1B."""
MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 1024, "num_experts": 8, "num_experts_per_tok": 2}
BF16 = {"dtype": "bfloat16"}
MIXED: dict[str, Any] = {"dtype": "float32", "compute_dtype": "bfloat16"}
LEVERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"model": BF16},
    "autocast": {"model": MIXED},
    "packed": {"model": MIXED, "pack": True},
    "bfloat16, packed": {"model": BF16, "pack": True},
    "LoRA": {"model": BF16, "peft": "lora", "pack": True},
    "QLoRA": {"model": BF16, "peft": "qlora", "pack": True},
    "selective recompute": {"model": BF16, "pack": True, "policy": "selective"},
    "full recompute": {"model": BF16, "pack": True, "policy": "full"},
    "experts": {"model": {**BF16, "config": MOE}, "pack": True},
    "experts, autocast": {"model": {**MIXED, "config": MOE}, "pack": True},
    "DPO": {"model": BF16, "objective": "dpo", "pack": True},
    "distillation": {"model": {**BF16, "loss": "chunked"}, "objective": "distillation"},
    "Muon": {"model": BF16, "optimizer": "muon", "pack": True},
    "adamw8bit": {"model": BF16, "optimizer": "adamw8bit"},
}
"""Arguments of `cases.step`; policy: activation checkpointing."""
TAKEN = {"experts": [*EXPERT_LAYOUTS], "experts, autocast": ["single"]}
"""Layouts of a lever; others have LAYOUTS. Autocast is that of unsharded weights."""
PAIRS = [(lever, layout) for lever in LEVERS for layout in TAKEN.get(lever, LAYOUTS)]
PEAK_TOLERANCE = 0.1 if has_grouped_queries() else 0.15
"""Largest relative difference of the planner's peak memory, which does not count the repeated keys of torch 2.11."""
UNPLANNED = {("adamw8bit", "single"): 0.15}
"""Pairs with a larger one: torchao's update, which GPUs compile, holds several float32 copies of the embedding if it is
not compiled."""


def peak_tolerance(lever: str, layout: str) -> float:
    """Return the largest relative difference of the planner's peak memory for a pair."""
    return UNPLANNED.get((lever, layout), PEAK_TOLERANCE)


ATTENTION = ("_varlen_attn", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
             "_scaled_dot_product_cudnn_attention")  # fmt: skip
COLLECTIVES = {
    "all-gathers": ("_allgather_base_", "all_gather_into_tensor"),
    "reduce-scatters": ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    "all-reduces": ("allreduce_", "all_reduce", "all_reduce_"),
    "all-to-alls": ("alltoall_base_", "all_to_all_single"),
    "sends": ("send", "recv_"),
}


def arguments(lever: str, layout: str, layers: int = 2) -> dict[str, Any]:
    """Return the arguments of `cases.step` for a pair. layers: Those of a rank."""
    axes, world = EXPERT_LAYOUTS[layout]
    values = dict(LEVERS[lever])
    if policy := values.pop("policy", None):
        axes = {**axes, "activation_checkpointing": policy}
    model = values["model"]
    config = {**SIZES, **model.get("config", {}), "num_hidden_layers": layers * axes.get("pp", 1)}
    return {
        **values,
        "model": {**model, "config": config},
        "axes": axes,
        "world": world,
        "rows": [SEQ_LEN, ROWS, MICRO_BATCHES],
    }


def ranks(layout: str) -> list[int]:
    """Return the ranks to run: the first, and one of the last stage of a pipeline."""
    world = EXPERT_LAYOUTS[layout][1]
    return [0, world - 1] if layout == "pp" else [0]


def collectives(record: dict[str, Any]) -> Counter[str]:
    """Return the number of collectives of a step by kind."""
    found = {kind: sum(record["operators"].get(name, 0) for name in names) for kind, names in COLLECTIVES.items()}
    return Counter({kind: number for kind, number in found.items() if number})


def planned_memory(lever: str, layout: str, rank: int) -> MemoryEstimate:
    """Return the planner's estimate of the memory of a rank in the step of `arguments`."""
    from tests.gpu_ready.cases import config_of

    values = arguments(lever, layout)
    objective = values.get("objective")
    options = {name: values[name] for name in ("peft", "pack", "optimizer") if name in values}
    cfg = config_of(values["model"], values["axes"], **options)
    cfg.training.seq_len, cfg.training.micro_batch_size = SEQ_LEN, ROWS
    mesh = cfg.parallelism.resolve(values["world"])
    cfg.training.global_batch_size = MICRO_BATCHES * ROWS * mesh.dp
    work = build_workload(cfg, mesh, on_gpu=True, device_memory=MEMORY)
    if objective == "dpo":
        work = replace(work, micro_batch=2 * ROWS, rows_per_unit=2)
    if objective == "distillation":
        work = replace(work, frozen=work.architecture, frozen_bytes=work.stored_bytes)
    return rank_memory(work, rank * mesh.pp // mesh.world, "cuda")


def difference(shorter: dict[str, Any], longer: dict[str, Any]) -> dict[str, Any]:
    """Return what one more layer launches, moves (GB) and sends in a micro-batch, from the records of two steps."""
    share = shorter["micro_batches"]
    launches, moved = (sum(longer[name].values()) - sum(shorter[name].values()) for name in ("launches", "moved"))
    sent = collectives(longer)
    sent.subtract(collectives(shorter))
    return {
        "launches": launches / share,
        "GB": round(moved / share / 1e9, 3),
        "collectives": {kind: number / share for kind, number in sent.items() if number},
    }


def per_layer(run: Run, lever: str, layout: str, **more: Any) -> dict[str, Any]:
    """Return the `difference` of one and two layers of a rank. more: Further arguments of `cases.step`."""
    shorter, longer = (run("step", **arguments(lever, layout, layers), **more) for layers in (1, 2))
    return difference(shorter, longer)
