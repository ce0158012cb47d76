"""torchtitan's Llama 3, loss and step, combined as in its Trainer of version 0.3.0.

Weights are converted by torchtitan's adapter. Its attention for language models needs a GPU; on a CPU, its module for
other models is used, which computes the same for rows of one document. It has no packed rows without flex attention or
varlen kernels and no converter of peft's adapters, so this arm trains all parameters on rows of one document each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import IGNORED, Workload

LOSS_CHUNKS = 8
"""Parts of a row whose logits exist at a time, torchtitan's default."""


def train(workload: Workload, meter: Meter) -> None:
    """Run the loop of torchtitan's Trainer, without logs, validation and checkpoints."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import CompileConfig

    if workload.lora_rank or workload.layout != "rows":
        sys.exit("the arm of torchtitan trains all parameters, on rows of one document each")
    model = build(workload).to(workload.device).train()
    compiled = CompileConfig(enable=True, components=["model", "loss"]) if workload.compile else None
    if compiled:
        for block in model.layers.values():
            block.compile(fullgraph=True)
    model._skip_lm_head = True
    loss_fn = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=LOSS_CHUNKS), compile_config=compiled)
    loss_fn.set_lm_head(model.lm_head)
    settings: dict[str, Any] = {"lr": workload.lr, "betas": workload.betas, "eps": workload.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)

    for step in range(workload.total_steps):
        batches = list(workload.micro_batches(step))
        targets = [torch.nn.functional.pad(each["labels"][:, 1:], (0, 1), value=IGNORED) for each in batches]
        count = sum((target != IGNORED).sum() for target in targets)
        total = torch.zeros((), device=workload.device)
        for batch, labels in zip(batches, targets, strict=True):
            positions = torch.arange(workload.seq_len, device=workload.device).expand_as(labels)
            masks = model.get_attention_masks(positions) if workload.device == "cuda" else None
            with workload.autocast:
                hidden = model(batch["input_ids"], positions, masks)
                loss, _ = loss_fn(hidden, labels, count)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=workload.max_grad_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.step(total, optimizer)


def build(workload: Workload) -> Any:
    """Return torchtitan's decoder with the common weights."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, Llama3TransformerBlock

    set_spmd_backend("default")  # a single device: no types of sharding are checked
    shape = workload.shape
    rope = ComplexRoPE.Config(
        dim=shape.head_dim,
        max_seq_len=workload.seq_len,
        theta=500_000,
        scaling="llama",
        scaling_factor=shape.rope_factor,
    )
    on_gpu = workload.device == "cuda"
    attention = get_attention_config("varlen") if on_gpu else ScaledDotProductAttention.Config()
    unused: dict[str, Any] = {}  # initial values: the common weights replace them
    norm = RMSNorm.Config(normalized_shape=shape.hidden, eps=1e-5, param_init=unused)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=shape.hidden,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                wqkv_param_init=unused,
                wo_param_init=unused,
                inner_attention=attention,
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=shape.hidden, hidden_dim=shape.intermediate, w1_param_init=unused, w2w3_param_init=unused
            ),
        )
        for _ in range(shape.layers)
    ]
    config = Llama3Model.Config(
        dim=shape.hidden,
        vocab_size=shape.vocabulary,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocabulary, embedding_dim=shape.hidden, param_init=unused),
        norm=norm,
        lm_head=Linear.Config(in_features=shape.hidden, out_features=shape.vocabulary, param_init=unused),
        layers=layers,
    )
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(workload.model.glob("*.safetensors")):
        weights |= load_file(file)
    torch.set_default_dtype(workload.stored)  # of parameters; the rotary embedding's table keeps its own
    model = config.build()
    torch.set_default_dtype(torch.float32)
    model.load_state_dict(Llama3StateDictAdapter(config, None).from_hf(weights))
    return model


if __name__ == "__main__":
    run(train, "torchtitan")
