"""Sizes of a model that a mesh must divide, read from its files in milliseconds, without transformers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from components.config.errors import ConfigError
from components.config.model_files import locate, size_problems
from components.config.safe_yaml import load_yaml
from components.config.schema.checks import field_values, raise_all
from components.config.schema.model import ModelConfig
from components.project import PROJECT
from components.protocol.safe_json import load_json

CONFIG_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "hidden": ("hidden_size", "n_embd"),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "head_dim": ("head_dim",),
    "mlp": ("intermediate_size", "n_inner"),
    "expert_mlp": ("moe_intermediate_size",),
    "shared_mlp": ("shared_expert_intermediate_size",),
    "experts_per_token": ("num_experts_per_tok",),
    "window": ("sliding_window",),
    "tied": ("tie_word_embeddings",),
    "per_layer_input": ("hidden_size_per_layer_input",),
}
"""Name of a size in Meshbook -> its keys in config.json files."""

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

NOT_ROTARY = frozenset({
    *("bloom", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mamba", "mamba2", "mpt", "openai-gpt"),
    *("opt", "rwkv", "xglm"),
})  # fmt: skip
"""Model types whose positions are not rotary, or are rotary without transformers' types of scaling."""

GGUF_NAMES = {
    "block_count": "layers",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "embedding_length": "hidden",
    "vocab_size": "vocab",
    "expert_count": "experts",
    "expert_used_count": "experts_per_token",
    "feed_forward_length": "mlp",
    "expert_feed_forward_length": "expert_mlp",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "window",
}
"""Key of a GGUF header, without the architecture prefix -> name in Meshbook."""
GGUF_FAMILIES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""Architecture in a GGUF header -> transformers' model type, where they differ."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model before it is loaded; None: unknown."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    experts: int | None = None
    """Experts per mixture-of-experts layer; 0: a dense model."""
    family: str | None = None
    """transformers' model type."""
    head_dim: int | None = None
    """Width of an attention head; None: hidden / heads, unless the family has another default."""
    mlp: int | None = None
    """Intermediate size of the dense MLPs."""
    expert_mlp: int | None = None
    """Intermediate size of one expert."""
    shared_mlp: int | None = None
    """Intermediate size of the experts that every token passes."""
    experts_per_token: int | None = None
    window: int | None = None
    """Sliding window in tokens of the layers that have one."""
    tied: bool | None = None
    """Whether the LM head shares its weight with the embedding."""
    rotary: bool | None = None
    """Whether it has rotary position embeddings with transformers' types of scaling."""
    per_layer_input: int | None = None
    """Width of the inputs that each layer gets from the token ids, beside the hidden states (Gemma 4 E2B); 0: none."""

    @property
    def tp_divides_mlp(self) -> bool:
        """Whether the model's tp plan shards the features of its MLPs."""
        return self.family in PLANNED_MLP


def read_shape(model: ModelConfig) -> ModelShape:
    """Return the sizes of a model: the stated ones, overridden by local files, then by `model.config`.

    Unstated sizes are those of the option of conf/model that has the model's path, if there is one.
    """
    stated = field_values(model)
    sizes: dict[str, Any] = {field.name: stated.get(field.name) for field in fields(ModelShape)}
    if model.path is not None:
        if sizes["family"] is None or sizes["layers"] is None:
            sizes |= {name: size for name, size in _sizes_of_option(model.path).items() if sizes[name] is None}
        files = locate(model.path)
        if files.gguf_file:
            sizes |= _read_gguf(Path(files.name_or_folder) / files.gguf_file)
        elif files.is_local and (Path(files.name_or_folder) / "config.json").is_file():
            config = _read_config_json(Path(files.name_or_folder) / "config.json")
            raise_all(size_problems(config, f"model.path={model.path}: config.json", model.config))
            sizes |= shape_of_config(config) | _shape_of_family({**config, **model.config})
            if sizes["experts"] is None and _is_dense(config):
                sizes["experts"] = 0
    else:
        sizes |= _shape_of_family(model.config)
    raise_all(size_problems({}, "model.config", model.config))
    sizes |= shape_of_config(model.config)
    return ModelShape(**sizes)


def _sizes_of_option(path: str) -> dict[str, Any]:
    """Return the sizes in the option of conf/model whose model has this path; empty if there is none."""
    names = {each.name for each in fields(ModelShape)}
    for file in sorted((PROJECT / "conf" / "model").glob("*.yaml")):
        text = file.read_text("utf-8")
        if path in text and (values := load_yaml(text)).get("path") == path:
            return {name: value for name, value in values.items() if name in names}
    return {}


def shape_of_built(config: dict[str, Any]) -> ModelShape:
    """Return the sizes of a built model, given its whole Hugging Face config as a dict."""
    sizes = shape_of_config(config) | _shape_of_family(config)
    return ModelShape(**(sizes | ({"experts": 0} if _is_dense(config) else {})))


def _is_dense(config: dict[str, Any]) -> bool:
    return "expert" not in str(config)


def shape_of_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes in a Hugging Face config, given as a dict; those of a nested text_config take precedence."""
    nested = config.get("text_config")
    values = {**config, **nested} if isinstance(nested, dict) else config
    return {
        size: values[key] for size, keys in CONFIG_NAMES.items() for key in keys if isinstance(values.get(key), int)
    }


def _shape_of_family(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that follow from the model type."""
    kind: str | None = config.get("model_type")
    shape: dict[str, Any] = {} if kind is None else {"family": kind}
    if kind in DENSE:
        shape["experts"] = 0
    if kind in NOT_ROTARY:
        shape["rotary"] = False
    return shape


def _read_config_json(path: Path) -> dict[str, Any]:
    try:
        config = load_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path.parent}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model.path={path.parent}: config.json does not hold a JSON object")
    return config


def _read_gguf(path: Path) -> dict[str, Any]:
    """Read a GGUF header up to the arrays of the tokenizer. The gguf package would parse all 98,000 strings, in 2.6 s.

    Layout: the GGUF specification, version 3 (ggml-org/ggml, docs/gguf.md).
    """
    shape: dict[str, Any] = {}
    architecture = ""
    try:
        with path.open("rb") as file:
            magic, version, _, entries = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version < 2:
                raise ValueError("not a GGUF file of version 2 or later")
            for _ in range(entries):
                key = _read_string(file)
                if key.startswith("tokenizer."):
                    break
                value = _read_value(file, struct.unpack("<I", file.read(4))[0])
                size = GGUF_NAMES.get(key.partition(".")[2])
                if size and isinstance(value, int):
                    shape[size] = value
                if key == "general.architecture":
                    architecture = str(value)
            shape.setdefault("experts", 0)
            shape["family"] = GGUF_FAMILIES.get(architecture, architecture)
    except (OSError, struct.error, UnicodeDecodeError, KeyError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path={path}: the GGUF header cannot be read: {error}") from error
    named = {CONFIG_NAMES[size][0]: value for size, value in shape.items() if size in CONFIG_NAMES}
    raise_all(size_problems(named, f"model.path={path}: its header"))
    return shape


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format."""
_LONGEST = 2**20
"""Most bytes of a text and values of a list in a GGUF header, before its tokenizer."""


def _read_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST:
        raise ValueError(f"a text of {length:,} bytes")
    return file.read(length).decode()


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _read_string(file)
    if kind == 9:
        element, count = struct.unpack("<IQ", file.read(12))
        if count > _LONGEST:
            raise ValueError(f"a list of {count:,} values")
        return [_read_value(file, element) for _ in range(count)]
    fmt = "<" + _SCALARS[kind]
    return struct.unpack(fmt, file.read(struct.calcsize(fmt)))[0]
