"""What holds for all models of a transformers model type, in tables; a test compares each with built models."""

from __future__ import annotations

from collections.abc import Mapping

PLANNED_MLP = frozenset({
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite"),
    *("helium", "llama", "ministral", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "qwen2", "qwen3", "seed_oss"),
    *("hunyuan_v1_dense", "smollm3", "stablelm"),
})  # fmt: skip
"""Dense model types whose tp plan shards the MLPs, so that tp must divide intermediate_size."""
DENSE = PLANNED_MLP | {
    *("bloom", "codegen", "falcon", "falcon_h1", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
    *("lfm2", "mamba", "mamba2", "mpt", "opt", "persimmon", "phi", "phi3"),
    "starcoder2",
}
"""Model types without experts. The config of any other type may omit the number of experts and mean a default."""
LAYERS_RETURN_PAIRS = frozenset({"bamba", "falcon_h1"})
"""Model types whose decoder layers return pairs of which the first is the hidden states."""
WHOLE_ROWS = frozenset({
    *("big_bird", "bloom", "codegen", "cpmant", "falcon", "falcon_mamba", "gpt_neo", "gpt_neox_japanese", "gptj"),
    *("jamba", "mamba", "mamba2", "moshi", "mpt", "openai-gpt", "recurrent_gemma", "rembert", "roformer", "rwkv"),
    *("xglm", "xlnet", "zamba"),
})  # fmt: skip
"""Model types whose rows hold one document on one rank: their attention is code of their own, or a state passes from
token to token in functions that Meshbook does not know. Others show it by the layer types in their config.json."""
CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = (CONVOLUTION, "torch_chunk_gated_delta_rule")
_KIMI_DELTA = (CONVOLUTION, "chunk_kimi_delta_attention")
_MAMBA2 = (CONVOLUTION, "mamba2_chunk_scan")
MIXERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _DELTA_RULE),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KIMI_DELTA),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"), _MAMBA2),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), (CONVOLUTION,)),
}
"""Model type -> functions of its transformers modeling file by which layers other than attention mix tokens."""
