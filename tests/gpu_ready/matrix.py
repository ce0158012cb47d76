"""Levers and layouts of a step on fake CUDA tensors, and the table of what a layer launches, moves and sends.

python -m tests.gpu_ready.matrix       # every lever on every layout: outputs/gpu_ready/table.md (about 10 minutes)
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gpu_ready.conftest import Run, build_stub, started_server

TABLE = Path(__file__).resolve().parents[2] / "outputs" / "gpu_ready" / "table.md"
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
MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Layers whose inputs two tp ranks share in whole blocks of 64 values, which NF4 scales together."""
BF16 = {"dtype": "bfloat16"}
MIXED: dict[str, Any] = {"dtype": "float32", "compute_dtype": "bfloat16"}
LEVERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"model": BF16},
    "autocast": {"model": MIXED},
    "packed": {"model": MIXED, "pack": True},
    "LoRA": {"model": BF16, "peft": "lora", "pack": True},
    "QLoRA": {"model": {**BF16, "config": WIDE}, "peft": "qlora", "pack": True},
    "selective recompute": {"model": BF16, "pack": True, "policy": "selective"},
    "full recompute": {"model": BF16, "pack": True, "policy": "full"},
    "experts": {"model": {**BF16, "config": MOE}, "pack": True},
    "DPO": {"model": BF16, "objective": "dpo", "pack": True},
    "distillation": {"model": {**BF16, "loss": "chunked"}, "objective": "distillation"},
    "Muon": {"model": BF16, "optimizer": "muon", "pack": True},
    "adamw8bit": {"model": BF16, "optimizer": "adamw8bit"},
}
"""Arguments of `cases.step`; policy: activation checkpointing."""
PAIRS = [(lever, layout) for lever in LEVERS for layout in (EXPERT_LAYOUTS if lever == "experts" else LAYOUTS)]
ATTENTION = ("_varlen_attn", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
             "_scaled_dot_product_cudnn_attention")  # fmt: skip
COLLECTIVES = {
    "all-gathers": ("_allgather_base_", "all_gather_into_tensor"),
    "reduce-scatters": ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    "all-reduces": ("allreduce_", "all_reduce", "all_reduce_"),
    "all-to-alls": ("alltoall_base_", "all_to_all_single"),
    "sends": ("send", "recv_"),
}


def arguments(lever: str, layout: str, layers: int | None = None) -> dict[str, Any]:
    """Return the arguments of `cases.step` for a pair."""
    axes, world = EXPERT_LAYOUTS[layout]
    values = dict(LEVERS[lever])
    if policy := values.pop("policy", None):
        axes = {**axes, "activation_checkpointing": policy}
    if layers is not None:
        model = values["model"]
        values["model"] = {**model, "config": {**model.get("config", {}), "num_hidden_layers": layers}}
    return {**values, "axes": axes, "world": world}


def ranks(layout: str) -> list[int]:
    """Return the ranks to run: the first, and one of the last stage of a pipeline."""
    world = EXPERT_LAYOUTS[layout][1]
    return [0, world - 1] if layout == "pp" else [0]


def collectives(record: dict[str, Any]) -> Counter[str]:
    """Return the number of collectives of a step by kind."""
    found = {kind: sum(record["operators"].get(name, 0) for name in names) for kind, names in COLLECTIVES.items()}
    return Counter({kind: number for kind, number in found.items() if number})


def per_layer(fake_cuda: Run, lever: str, layout: str) -> dict[str, float]:
    """Return what one more layer launches, moves (MB) and sends in a micro-batch, by the difference of two models."""
    shorter, longer = (
        fake_cuda("step", **arguments(lever, layout, layers)) for layers in ((4, 8) if layout == "pp" else (2, 3))
    )
    layers = 2 if layout == "pp" else 1  # of a rank
    share = shorter["micro_batches"] * layers
    sums = {name: sum(longer[name].values()) - sum(shorter[name].values()) for name in ("launches", "moved")}
    sent = collectives(longer)
    sent.subtract(collectives(shorter))
    return {
        "launches": sums["launches"] / share,
        "MB": sums["moved"] / share / 1e6,
        **{kind: number / share for kind, number in sent.items() if number},
    }


def main() -> None:
    """Write the table."""
    rows = ["| lever | layout | launches | MB | collectives | host syncs |", "|---" * 6 + "|"]
    with tempfile.TemporaryDirectory() as folder, started_server(build_stub(Path(folder))) as fake_cuda:
        for lever, layout in PAIRS:
            found = per_layer(fake_cuda, lever, layout)
            record = fake_cuda("step", **arguments(lever, layout))
            launches, megabytes = found.pop("launches"), found.pop("MB")
            sent = ", ".join(f"{number:g} {kind}" for kind, number in found.items()) or "-"
            waits = sum(record["waits"].values()) + ("one per layer" if layout == "ep" else "")
            rows.append(f"| {lever} | {layout} | {launches:.1f} | {megabytes:.2f} | {sent} | {waits} |")
            print(rows[-1], flush=True)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
