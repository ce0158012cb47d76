"""Predicted time of a training step on a GPU, from the operators that it launches.

    python -m tests.gpu_ready.roofline            # 1B full, 8B LoRA and 8B QLoRA on H200 and H100: speeds.json

Every operator of the real `train_step` on fake CUDA tensors takes the longest of its bytes at the memory's bandwidth,
its FLOPs at the rate of its kind, and `LAUNCH_SECONDS`. For compiled layers, the elementwise bytes are those of
Inductor's fused kernels (inductor_bytes.py). Overlap, clocks and the allocator are left out. These are predictions,
good to about 15 %: nothing here has been measured on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tests.gpu_ready.device import _is_cuda, _only_describes

Run = Callable[..., Any]
LAUNCH_SECONDS = 2e-6
GEMM, ATTENTION, HEAD, LOSS, VOCABULARY, OPTIMIZER, NF4, SHARDS, LAYERS = (
    "GEMM of layers", "attention", "head GEMM", "loss elementwise", "embedding and head weights", "optimizer",
    "NF4 unpack", "copies of FSDP2", "layers elementwise",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """Assumed rates of a GPU, frozen: they were chosen before any change was predicted with them."""

    gemm: float
    """FLOP/s of bf16 matrix products."""
    bandwidth: float
    """Bytes per second of its memory."""
    attention_forward: float = 350e12
    """FLOP/s of FlashAttention 2."""
    attention_backward: float = 300e12

    def with_flash3(self) -> Device:
        """Return the device with the rates of FlashAttention 3 (Shah et al. 2024, for heads of 128, causal)."""
        return replace(self, attention_forward=600e12, attention_backward=500e12)


DEVICES = {"H200": Device(700e12, 3.8e12), "H100": Device(650e12, 2.6e12)}


@dataclass
class Costs(TorchDispatchMode):
    """Operators of one step by kind: their bytes and FLOPs."""

    vocabulary: int
    parameters: frozenset[tuple[int, ...]] = frozenset()
    """Shapes of the parameters that FSDP2 casts, gathers and reduces; empty: it shards none."""
    operators: dict[str, Counter[tuple[str, int, int]]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind -> (operator, bytes, FLOPs) -> number of launches."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if _only_describes(func) or not any(map(_is_cuda, tensors)):
            return result
        name = func.overloadpacket.__name__
        moved = _bytes([each for each in tensors if _is_cuda(each)], name)
        self.operators[self._kind(name, tensors)][name, moved, _flops(func, name, args, kwargs, result)] += 1
        return result

    def _kind(self, name: str, tensors: list[torch.Tensor]) -> str:
        is_vocabulary = any(self.vocabulary in each.shape for each in tensors)
        is_logits = any(each.shape[-1:] == (self.vocabulary,) for each in tensors)
        if "_fused_adam" in name or name.startswith("_foreach"):
            return OPTIMIZER
        if "attn" in name or "attention" in name:
            return ATTENTION
        if name == "unpack_nf4":
            return NF4
        if name in MATMULS:
            return HEAD if is_vocabulary else GEMM
        flat = all(each.dim() < 2 or tuple(each.shape) in self.parameters for each in tensors)
        if self.parameters and (flat or name == "chunk_cat"):
            return SHARDS
        return LOSS if is_logits else VOCABULARY if is_vocabulary else LAYERS


MATMULS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
INDEXED = {"gather", "scatter_add_", "embedding"}
"""Operators that read or write only the entries of their largest tensor that an index names."""


def _bytes(tensors: list[torch.Tensor], name: str) -> int:
    sizes = [each.numel() * each.element_size() for each in tensors]
    if name not in INDEXED:
        return sum(sizes)
    return 2 * sum(size for size in sizes if size < max(sizes))


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name == "_varlen_attn" or name == "_varlen_attn_backward":
        offset = 1 if "backward" in name else 0
        query = args[offset]
        tokens, heads, width = query.shape
        longest = args[5 + (3 if offset else 0)]
        flops = 2 * tokens * longest * heads * width  # two products, half of the square
        return int(flops * 2.5) if offset else flops
    if name in MATMULS and name.startswith("addmm"):
        (rows, inner), columns = args[1].shape, args[2].shape[1]
        return 2 * rows * inner * columns
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def seconds(operators: dict[str, list[list[Any]]], device: Device) -> dict[str, float]:
    """Return the predicted seconds of each kind of operators, as `cases.costs` returned them."""
    return {kind: sum(each[3] * _seconds(device, *each[:3]) for each in kept) for kind, kept in operators.items()}


def _seconds(device: Device, name: str, moved: int, flops: int) -> float:
    rate = device.gemm
    if "attn" in name or "attention" in name:
        rate = device.attention_backward if "backward" in name else device.attention_forward
    return max(moved / device.bandwidth, flops / rate, LAUNCH_SECONDS)


_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "1B": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The shapes of Llama 3.2 1B and Llama 3.1 8B."""


@dataclass(frozen=True, slots=True)
class Work:
    """A training step: rows of 4,096 tokens, one document each, bfloat16."""

    model: str
    peft: str
    micro_batch: int
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return 4096 * self.rows

    def arguments(self, fused: str, layers: int, dtype: str) -> dict[str, Any]:
        """Return the arguments of `cases.costs`."""
        config = {**MODELS[self.model], "num_hidden_layers": layers}
        return {
            "model": {"dtype": dtype, "config": config, "fused": fused}, "peft": self.peft,
            "micro_batch_size": self.micro_batch, "global_batch_size": self.rows,
        }  # fmt: skip


SIMULATED_LAYERS = (2, 3)
Step = list[dict[str, list[list[Any]]]]
"""What `cases.costs` returned for each of SIMULATED_LAYERS."""
WORK = {
    "1B full": Work("1B", "none", 4, 8),
    "8B LoRA": Work("8B", "lora", 2, 2),
    "8B QLoRA": Work("8B", "qlora", 2, 2),
}


def costs(run: Run, work: Work, fused: str, dtype: str = "bfloat16", **more: Any) -> Step:
    """Return the operators of the step of two and of three layers. more: Further arguments of `cases.costs`."""
    return [run("costs", **work.arguments(fused, layers, dtype), **more) for layers in SIMULATED_LAYERS]


def step_seconds(work: Work, step: Step, device: Device) -> dict[str, float]:
    """Return the predicted seconds of each kind of operators, which grow by the same with each layer."""
    few, more = (seconds(each, device) for each in step)
    others = MODELS[work.model]["num_hidden_layers"] - SIMULATED_LAYERS[0]
    return {kind: value + others * (more[kind] - value) for kind, value in few.items()}


def compiled_seconds(
    work: Work, eager: dict[str, float], per_token: dict[str, float], device: Device
) -> dict[str, float]:
    """Return the seconds of each kind if layers and loss are compiled.

    Args:
        eager: Seconds of each kind, eager.
        per_token: What inductor_bytes.py printed.
    """
    layers = MODELS[work.model]["num_hidden_layers"]
    scale = work.tokens / device.bandwidth
    return {**eager, LAYERS: per_token["layer"] * layers * scale, LOSS: per_token["loss"] * scale}


def predict(run: Run, name: str, device: Device, *, flash3: bool = False) -> float:
    """Return the tokens per second of compiled layers and loss."""
    work = WORK[name]
    chosen = device.with_flash3() if flash3 else device
    eager = step_seconds(work, costs(run, work, "all"), chosen)
    return work.tokens / sum(compiled_seconds(work, eager, inductor_bytes(work), device).values())


def inductor_bytes(work: Work) -> dict[str, float]:
    """Return what inductor_bytes.py prints."""
    command = [sys.executable, "-m", "tests.gpu_ready.inductor_bytes", work.model, work.peft]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Record the predictions in speeds.json: milliseconds of each kind of operators.

    The columns of commit 0a6a30f stay as they are: neither its operators nor the assumed rates change.
    """
    from tests.gpu_ready.conftest import build_stub, started_server
    from tests.gpu_ready.table import SPEEDS

    rows = []
    recorded = {(row["work"], row["device"]): row["milliseconds"] for row in json.loads(SPEEDS.read_text())}
    with tempfile.TemporaryDirectory() as folder:
        stub = build_stub(Path(folder))
        with started_server(stub) as run:
            for name, work in WORK.items():
                per_token, after = inductor_bytes(work), costs(run, work, "all")
                by_auto = costs(run, work, "all", "auto", strategy="fsdp2")
                for kind, device in DEVICES.items():
                    eager = step_seconds(work, after, device)
                    flash3 = step_seconds(work, after, device.with_flash3())
                    auto = step_seconds(work, by_auto, device)
                    auto_flash3 = step_seconds(work, by_auto, device.with_flash3())
                    columns = {
                        "now, not compiled": eager,
                        "now, compiled": compiled_seconds(work, eager, per_token, device),
                        "now, compiled, FlashAttention 3": compiled_seconds(work, flash3, per_token, device),
                        "by auto": compiled_seconds(work, auto, per_token, device),
                        "by auto, FlashAttention 3": compiled_seconds(work, auto_flash3, per_token, device),
                    }
                    milliseconds = {
                        column: terms for column, terms in recorded[name, kind].items() if column.startswith("before")
                    }
                    milliseconds |= {
                        column: {term: round(1e3 * value, 1) for term, value in times.items()}
                        for column, times in columns.items()
                    }
                    rows.append({"work": name, "device": kind, "tokens": work.tokens, "milliseconds": milliseconds})
                    print(rows[-1], flush=True)
    SPEEDS.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
