"""recipes/finetune.py in this process, complete with its configuration, data, loop and reporting.

The token file is read as data of kind `custom`. The recipe packs the documents itself; equal losses confirm that its
rows are those of the other arms. Only `training.train_step` is wrapped, to measure losses, optimizer and time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import Workload

WORKLOAD = "MESHBOOK_COMPARED_WORKLOAD"
"""Environment variable with the path of the workload file, for `examples`, which the recipe imports by name."""


def examples(tokenizer: object, seq_len: int, split: str) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids and labels of all documents; the held-out split is the first one, as evaluation is not measured."""
    tokens = Workload.read(os.environ[WORKLOAD]).tokens
    for number in range(len(tokens.ends) if split == "train" else 1):
        ids, labels = tokens.document(number)
        yield ids.tolist(), labels.tolist()


def overrides_of(workload: Workload) -> list[str]:
    """Return the recipe's overrides for a workload."""
    data = ["~data", "+schema/data@data=custom", "data.factory=scripts.benchmark.peers.meshbook:examples"]
    stored = str(workload.stored).removeprefix("torch.")
    computed = "bfloat16" if workload.precision != "float32" else "float32"
    peft = ["peft=lora", f"peft.rank={workload.lora_rank}", f"peft.alpha={2 * workload.lora_rank}"]
    return [
        *data,
        "data.eval_split=eval",
        f"data.pack={workload.layout == 'packed'}",
        *("model=llama3_2_1b", f"model.path='{workload.model}'"),  # the sizes are those of its config.json
        *(f"model.dtype={stored}", f"model.compute_dtype={computed}", f"model.compile={workload.compile}"),
        *(peft if workload.lora_rank else []),
        *("parallelism=single", f"cluster.device={workload.device}", "cluster.procs_per_node=1"),
        *(f"training.max_steps={workload.total_steps}", f"training.log_every={workload.total_steps}"),
        *(f"training.global_batch_size={workload.rows}", f"training.micro_batch_size={workload.micro}"),
        *(f"training.seq_len={workload.seq_len}", f"training.max_grad_norm={workload.max_grad_norm}"),
        *("training.eval_every=0", "generation.samples=0", "logging.examples=0", "logging.plot=false"),
        *(f"optimizer.lr={workload.lr}", f"optimizer.betas={list(workload.betas)}", f"optimizer.eps={workload.eps}"),
        *("optimizer.weight_decay=0", "optimizer.schedule=constant", "optimizer.warmup_steps=0"),
        *("checkpoint.last=false", "checkpoint.export=false", f"run.seed={workload.seed}"),
        f"run.dir='{Path(sys.argv[2]).with_suffix('.run').resolve()}'",
        *workload.overrides,
    ]


def train(workload: Workload, meter: Meter) -> None:
    """Run the recipe as from the command line."""
    from components import training
    from recipes import finetune

    step = training.train_step

    def measured_step(model: Any, batches: Any, optimizer: torch.optim.Optimizer, *others: Any) -> torch.Tensor:
        numbers = step(model, batches, optimizer, *others)
        meter.step(numbers["loss"], optimizer)
        return numbers

    training.train_step = measured_step
    os.environ[WORKLOAD] = str(Path(sys.argv[1]).resolve())
    sys.argv[1:] = overrides_of(workload)
    try:
        finetune.main()
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    run(train, "meshbook", "transformers")
