"""Bare PyTorch loop over transformers' model: the reference of every loss curve."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from scripts.benchmark.peers.hf import compile_layers, load_model, optimizer_of
from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import Workload


def train(workload: Workload, meter: Meter) -> None:
    """Do forward, loss, backward, clipping and AdamW, and nothing else; losses are read once, at the end."""
    model = load_model(workload)
    if workload.compile:
        compile_layers(model)
    optimizer = optimizer_of(model, workload)
    trained = optimizer.param_groups[0]["params"]
    for step in range(workload.total_steps):
        targets = workload.targets(step)
        total = torch.zeros((), device=workload.device)
        for batch in workload.micro_batches(step):
            labels = batch.pop("labels")
            with workload.autocast:
                logits = model(**batch).logits[:, :-1]
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(total, optimizer)


if __name__ == "__main__":
    run(train, "transformers", "peft")
