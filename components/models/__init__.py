"""Hugging Face causal LMs: built without memory, filled shard by shard, run, and written back.

build.py       build_on_meta: config from hub, folder, GGUF or values; model_shape
anatomy.py     read_anatomy: what a model is made of, as a value that every mesh axis takes
attention.py   use_causal_sdpa: attention without masks and host syncs; documents.py: within packed rows
lora.py        add_adapters: small matrices beside linear layers
float8.py      use_float8: linear layers that compute in 8 bits
layers.py      decoder_layers, checkpoint_activations, compile_layers, count_parameters
activations.py bytes that a layer saves for the backward; compile_cache.py: graphs of earlier runs
generation.py  generate: answers to prompts; tokenizer.py: load_tokenizer, also one token per byte
meta_copy.py   what transformers made before anything was sharded
weights/       reading, filling, gathering and exporting weights

Names are imported at first use; transformers is imported by what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.models.anatomy import Anatomy, read_anatomy
    from components.models.attention import use_causal_sdpa
    from components.models.build import build_on_meta, model_shape
    from components.models.generation import generate
    from components.models.layers import (
        ParameterCounts,
        checkpoint_activations,
        compile_layers,
        count_parameters,
        decoder_layers,
    )
    from components.models.lora import adapted_layers, adapters_off, add_adapters
    from components.models.tokenizer import load_tokenizer
    from components.models.weights.adapter_files import Merge, adapter_config, write_adapter
    from components.models.weights.export import export_model, export_run, export_stored
    from components.models.weights.initialize import initialize_weights
    from components.models.weights.loading import fill_weights, load_weights, weight_reader
    from components.models.weights.memory import materialize
else:
    __getattr__ = lazy.attach(__name__)
