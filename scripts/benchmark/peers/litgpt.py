"""litgpt's GPT, chunked loss and step with Lightning's Fabric, as in `litgpt pretrain` of version 0.5.13.

Weights are converted by litgpt's converter. litgpt supports neither packed documents nor the conversion of adapters, so
this arm trains all parameters on rows of one document each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import IGNORED, Workload

PRECISIONS = {"float32": "32-true", "mixed": "bf16-mixed", "bfloat16": "bf16-true"}


def train(workload: Workload, meter: Meter) -> None:
    """Run the loop of litgpt/pretrain.py, without logs, validation and checkpoints; the last target is ignored."""
    import lightning
    from litgpt.utils import chunked_cross_entropy

    if workload.lora_rank or workload.layout != "rows":
        sys.exit("litgpt supports neither packed rows nor the conversion of adapters")
    fabric = lightning.Fabric(accelerator=workload.device, devices=1, precision=PRECISIONS[workload.precision])
    model = build(workload, fabric)
    if workload.compile:
        model = torch.compile(model)
    model = fabric.setup(model)
    settings: dict[str, Any] = {"lr": workload.lr, "betas": workload.betas, "eps": workload.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=workload.device == "cuda")
    optimizer = fabric.setup_optimizers(optimizer)

    for step in range(workload.total_steps):
        total = torch.zeros((), device=workload.device)
        for number, batch in enumerate(workload.micro_batches(step)):
            targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
            accumulating = number < workload.accumulation - 1
            with fabric.no_backward_sync(model, enabled=accumulating):
                logits = model(batch["input_ids"])
                loss = chunked_cross_entropy(logits, targets)
                fabric.backward(loss / workload.accumulation)
            total += loss.detach() / workload.accumulation
        fabric.clip_gradients(model, optimizer, max_norm=workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(total, optimizer)


def build(workload: Workload, fabric: Any) -> Any:
    """Return litgpt's GPT with the common weights."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

    shape = workload.shape
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
    config = Config(
        name="compared",
        block_size=workload.seq_len,
        vocab_size=shape.vocabulary,
        padded_vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_query_groups=shape.kv_heads,
        n_embd=shape.hidden,
        intermediate_size=shape.intermediate,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
        rope_base=500_000,
        rope_adjustments={"factor": shape.rope_factor, **rope},
    )
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(workload.model.glob("*.safetensors")):
        weights |= load_file(file)
    converted: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, converted, weights)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    if shape.tied:
        model.transformer.wte.weight = model.lm_head.weight
    model.load_state_dict(converted)
    return model


if __name__ == "__main__":
    run(train, "litgpt", "lightning")
