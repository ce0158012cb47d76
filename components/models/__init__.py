"""Hugging Face causal LMs and score models: built on the meta device, loaded shard by shard, run, and exported.

build.py               build_on_meta: config from the hub, a folder, a GGUF file or given values; scaled RoPE
anatomy.py             read_anatomy: structure of a model (layers, experts, heads), as a value that every mesh axis uses
attention.py           use_causal_sdpa: attention without masks and host syncs; the fastest kernel, by measurement
documents.py           attention and linear layers within the documents of packed rows
classifier.py          TokenScores: a score head instead of the LM head
lora.py                add_adapters, operations on all adapters of a model, and LoRA on the fused matrices of experts
lora_linear.py         LoRA, DoRA and QLoRA on linear layers, and the matmuls of an adapter's factors
quantization.py        linear layers that compute in float8 or with fake-quantized weights, and 4-bit weights (NF4)
layers.py              decoder_layers, compile_layers, select_trained, meta_copy
activations.py         activation checkpointing, full and selective, and saved activations in host memory
fused_layers.py        fuse_layers: norms, rotary embeddings and SwiGLUs in fewer kernels
triton_kernels.py      kernels of SwiGLU and of NF4's unpacking, imported on a GPU only
generation.py          generate, generate_tokens, stream_tokens: greedy or sampled answers
tokenizer.py           load_tokenizer, including one token per byte
weights/               loading, initializing, gathering and exporting weights

Names are imported at first use. transformers is imported only by the modules that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components.chat_template import encode_messages, encode_prompt
    from components.models.activations import checkpoint_activations, offload_activations
    from components.models.anatomy import Anatomy, ParameterCounts, has_adapters, read_anatomy
    from components.models.attention import use_causal_sdpa
    from components.models.build import build_on_meta, check_positions, model_shape
    from components.models.fused_layers import FusedLayers, fuse_layers
    from components.models.generation import (
        RowsForward,
        Sampling,
        context_length,
        generate,
        generate_tokens,
        stop_tokens,
        stream_tokens,
    )
    from components.models.layers import (
        compile_layers,
        count_parameters,
        decoder_layers,
        select_trained,
    )
    from components.models.lora import adapters_off, add_adapters, read_adapter
    from components.models.tokenizer import load_tokenizer
    from components.models.weights.export import export_model, export_run, export_stored
    from components.models.weights.loading import (
        fill_weights,
        initialize_weights,
        load_weights,
        materialize,
        weight_reader,
    )
    from components.models.weights.untrained import file_notes, with_decoding
    from components.models.weights.weight_files import Merge, write_adapter
else:
    __getattr__, __dir__ = package.lazy_names(__name__)
