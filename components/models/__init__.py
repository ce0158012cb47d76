"""Hugging Face causal LMs: built without memory, filled shard by shard, run, and written back.

build.py       build_on_meta: config from hub, folder, GGUF or values; model_shape
tokenizer.py   load_tokenizer, also one token per byte
anatomy.py     read_anatomy: what a model is made of, as a value that every mesh axis takes
attention.py   use_causal_sdpa: attention without masks and host syncs
lora.py        add_adapters: small matrices beside linear layers; adapter_files.py: in PEFT's format; nf4.py: 4 bits
float8.py      use_float8: linear layers that compute in 8 bits
layers.py      decoder_layers, checkpoint_activations, compile_layers, count_parameters
memory.py      materialize: memory for the parameters, values for the buffers
weights.py     fill_weights: load_weights from disk, or initialize_weights (initialize.py) from a seed
generation.py  generate: answers to prompts
export.py      export_run, export_model, export_stored: a folder that transformers loads

shards.py tells which part of a tensor a rank holds, gather.py brings the parts of all ranks together, twin.py tells
what transformers made before anything was sharded, names.py which tensors are saved, weight_files.py writes them,
new_folder.py lets a folder appear once it is complete; gguf.py, safetensors.py and hub.py read files and explain why
they cannot.

Names are imported at first use; transformers is imported by what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.models.adapter_files import Merge, adapter_config, write_adapter
    from components.models.anatomy import Anatomy, read_anatomy
    from components.models.attention import use_causal_sdpa
    from components.models.build import build_on_meta, model_shape
    from components.models.export import export_model, export_run, export_stored
    from components.models.generation import generate
    from components.models.initialize import initialize_weights
    from components.models.layers import (
        ParameterCounts,
        checkpoint_activations,
        compile_layers,
        count_parameters,
        decoder_layers,
    )
    from components.models.lora import adapted_layers, adapters_off, add_adapters
    from components.models.memory import materialize
    from components.models.tokenizer import load_tokenizer
    from components.models.weights import fill_weights, load_weights, weight_reader
else:
    __getattr__ = lazy.attach(__name__)
