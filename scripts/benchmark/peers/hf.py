"""The common model, loaded by transformers and peft, for the bare loop and the Trainer."""

from __future__ import annotations

from typing import Any

import torch

from scripts.benchmark.peers.workload import Workload


def load_model(workload: Workload) -> Any:
    """Return the causal LM in training mode on the device, with trainable adapters if the workload has them."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=workload.stored, attn_implementation="sdpa")
    model.config.use_cache = False
    if workload.lora_rank:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(workload.adapter), is_trainable=True)
    return model.to(workload.device).train()


def compile_layers(model: Any) -> None:
    """Compile each decoder layer in place."""
    for layer in next(each for name, each in model.named_modules() if name.endswith("layers")):
        layer.compile(dynamic=False)


def optimizer_of(model: Any, workload: Workload) -> torch.optim.Optimizer:
    """Return PyTorch's fused AdamW over the trainable parameters, without weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": workload.lr, "betas": workload.betas, "eps": workload.eps, "weight_decay": 0.0}
    return torch.optim.AdamW(trained, **settings, fused=True)  # type: ignore[arg-type]
