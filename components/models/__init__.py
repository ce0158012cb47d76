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

The names below are imported at first use; transformers is imported by what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.lending import lend

if TYPE_CHECKING:
    from components.models.adapter_files import Merge, adapter_config, write_adapter  # noqa: F401
    from components.models.anatomy import Anatomy, read_anatomy  # noqa: F401
    from components.models.attention import use_causal_sdpa  # noqa: F401
    from components.models.build import build_on_meta, model_shape  # noqa: F401
    from components.models.export import export_model, export_run, export_stored  # noqa: F401
    from components.models.generation import generate  # noqa: F401
    from components.models.initialize import initialize_weights  # noqa: F401
    from components.models.layers import (  # noqa: F401
        ParameterCounts,
        checkpoint_activations,
        compile_layers,
        count_parameters,
        decoder_layers,
    )
    from components.models.lora import add_adapters  # noqa: F401
    from components.models.memory import materialize  # noqa: F401
    from components.models.tokenizer import load_tokenizer  # noqa: F401
    from components.models.weights import fill_weights, load_weights, weight_reader  # noqa: F401

__all__, __getattr__ = lend(
    __name__,
    {
        "anatomy": "Anatomy read_anatomy",
        "attention": "use_causal_sdpa",
        "build": "build_on_meta model_shape",
        "adapter_files": "Merge adapter_config write_adapter",
        "export": "export_model export_run export_stored",
        "generation": "generate",
        "initialize": "initialize_weights",
        "layers": "ParameterCounts checkpoint_activations compile_layers count_parameters decoder_layers",
        "lora": "add_adapters",
        "memory": "materialize",
        "tokenizer": "load_tokenizer",
        "weights": "fill_weights load_weights weight_reader",
    },
)
