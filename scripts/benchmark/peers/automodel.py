"""NeMo AutoModel's Llama, loss and step, combined as in its recipe train_ft.py of version 0.7.0.

The model is built from its class, because from_pretrained requires CUDA. The optimizer, clipping and loss are those of
the recipe's examples for Llama 3.2 1B. It trains all parameters on rows of one document each: packing needs
Transformer Engine, and its adapters are not loaded from peft's files.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import IGNORED, Workload


def train(workload: Workload, meter: Meter) -> None:
    """Run the loop of the recipe, without logs, validation and checkpoints."""
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

    if workload.lora_rank or workload.layout != "rows":
        sys.exit("the arm of NeMo AutoModel trains all parameters, on rows of one document each")
    model = build(workload).to(workload.device).train()
    if workload.compile:
        model = torch.compile(model)
    loss_fn = MaskedCrossEntropy()
    settings: dict[str, Any] = {"lr": workload.lr, "betas": workload.betas, "eps": workload.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=workload.device == "cuda")

    for step in range(workload.total_steps):
        batches = list(workload.micro_batches(step))
        targets = [torch.nn.functional.pad(each["labels"][:, 1:], (0, 1), value=IGNORED) for each in batches]
        count = sum(int((target != IGNORED).sum()) for target in targets)  # the recipe reads it on the host, too
        total = torch.zeros((), device=workload.device)
        for batch, labels in zip(batches, targets, strict=True):
            with workload.autocast:
                logits = model(input_ids=batch["input_ids"]).logits
                loss = loss_fn(logits, labels, num_label_tokens=count)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(total, optimizer)


def build(workload: Workload) -> Any:
    """Return NeMo AutoModel's own Llama with the common weights."""
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(workload.model)
    config.torch_dtype = workload.stored
    model = LlamaForCausalLM(config)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(workload.model.glob("*.safetensors")):
        weights |= load_file(file)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if workload.shape.tied else set()):
        raise RuntimeError(f"missing weights {missing}, unexpected weights {unexpected}")
    return model


if __name__ == "__main__":
    run(train, "nemo_automodel", "transformers")
