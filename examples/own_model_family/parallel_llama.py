"""A model family of our own: Llama whose attention and MLP read the same norm and are added together (as in PaLM)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class ParallelLlamaConfig(LlamaConfig):
    """Llama's config under another model type, with the tensor-parallel plan of the decoder layer below."""

    model_type = "parallel_llama"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }


class ParallelLayer(LlamaDecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm."""

    def __init__(self, config: ParallelLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.post_attention_layernorm

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return the new hidden states (batch, seq, hidden)."""
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **inputs)
        return hidden_states + attended + self.mlp(normed)


class ParallelLlamaModel(LlamaModel):
    """The decoder."""

    config_class = ParallelLlamaConfig

    def __init__(self, config: ParallelLlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(ParallelLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


class ParallelLlamaForCausalLM(LlamaForCausalLM):
    """The decoder and its LM head."""

    config_class = ParallelLlamaConfig

    def __init__(self, config: ParallelLlamaConfig) -> None:
        super().__init__(config)
        self.model = ParallelLlamaModel(config)
        self.post_init()


def register() -> None:
    """Make the family known to transformers in this process, under its model type."""
    AutoConfig.register(ParallelLlamaConfig.model_type, ParallelLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(ParallelLlamaConfig, ParallelLlamaForCausalLM, exist_ok=True)
