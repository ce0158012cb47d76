"""torchtune's model, chunked loss and step, as in its recipes full_ and lora_finetune_single_device.py (0.6.1).

Weights are converted by torchtune's converter. These recipes use a single dtype: there is no mixed precision, and
adapters have the model's dtype. They read the loss on the host in every step, and so does this arm.

Version 0.6.1 requires a version of torchao with `torchao.dtypes.nf4tensor` (0.10 was used), sentencepiece and tiktoken.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import Workload


def train(workload: Workload, meter: Meter) -> None:
    """Run the loop of torchtune's recipes, without logs and checkpoints."""
    from torchtune import training
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    if workload.precision == "mixed":
        sys.exit("torchtune's recipes have no mixed precision: use --precision bfloat16")
    model = build(workload)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {"lr": workload.lr, "betas": workload.betas, "eps": workload.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(trained, **settings, fused=True)
    loss_fn = CEWithChunkedOutputLoss()
    if workload.compile:
        training.compile_model(model)
        training.compile_loss(loss_fn)
    model.set_num_output_chunks(loss_fn.num_output_chunks)
    ignored = torch.full((workload.micro, 1), loss_fn.ignore_index, device=workload.device)

    for step in range(workload.total_steps):
        running, count = torch.zeros((), device=workload.device), torch.zeros((), device=workload.device)
        for batch in workload.micro_batches(step):
            tokens = (batch["labels"] != loss_fn.ignore_index).sum()
            logits = model(tokens=batch["input_ids"])
            labels = torch.hstack((batch["labels"][..., 1:], ignored))
            loss = loss_fn(logits, labels) * tokens
            del logits
            loss.backward()
            running += loss.detach()
            count += tokens
        training.scale_grads(model, 1 / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.step(running.item() / count.item(), optimizer)


def build(workload: Workload) -> Any:
    """Return torchtune's decoder with the common weights and, if the workload has them, the common adapters."""
    from torchtune import training
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
    from torchtune.models.llama3_2 import llama3_2
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    shape = workload.shape
    sizes = {
        "vocab_size": shape.vocabulary,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "embed_dim": shape.hidden,
        "intermediate_dim": shape.intermediate,
        "max_seq_len": workload.seq_len,
        "norm_eps": 1e-5,
        "rope_base": 500_000,
        "scale_factor": int(shape.rope_factor),
    }
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(workload.model.glob("*.safetensors")):
        weights |= load_file(file)
    converted = hf_to_tune(weights, num_heads=shape.heads, num_kv_heads=shape.kv_heads, dim=shape.hidden)
    with training.set_default_dtype(workload.stored), torch.device(workload.device):
        if workload.lora_rank:
            modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
            ranks = {"lora_rank": workload.lora_rank, "lora_alpha": 2 * workload.lora_rank}
            model = lora_llama3_1(modules, apply_lora_to_mlp=True, **sizes, **ranks)
            set_trainable_params(model, get_adapter_params(model))
        else:
            model = llama3_2(**sizes) if shape.tied else llama3_1(**sizes)
    if workload.lora_rank:
        adapters = load_file(workload.adapter / "adapter_model.safetensors")
        missing, unexpected = model.load_state_dict({**converted, **_adapters(adapters)}, strict=False)
        if missing or unexpected:
            raise RuntimeError(f"missing weights {missing}, unexpected weights {unexpected}")
    else:
        model.load_state_dict(converted)
    return model.train()


def _adapters(of_peft: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return peft's adapters under torchtune's names.

    torchtune permutes the rows of query and key weights within heads (RoPE); B needs no permutation, as it is zero.
    """
    from torchtune.models.convert_weights import _FROM_HF, get_mapped_key

    found = {}
    for name, tensor in of_peft.items():
        layer, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        target = get_mapped_key(f"{layer}.weight", _FROM_HF).removesuffix("weight")
        found[f"{target}{matrix.lower()}.weight"] = tensor
    return found


if __name__ == "__main__":
    run(train, "torchtune", "torchao")
