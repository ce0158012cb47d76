"""Sizes of a model, read from its files without transformers, and how a mesh divides them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from components.config.model_files import locate
from components.config.schema.model import MIXERS, ModelConfig
from components.package import PROJECT
from components.protocol.errors import ConfigError, field_values, raise_all
from components.protocol.safe_parsing import load_json, load_yaml

CONFIG_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "hidden": ("hidden_size", "n_embd"),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "head_dim": ("head_dim",),
    "linear_heads": ("linear_num_value_heads",),
    "mlp": ("intermediate_size", "n_inner"),
    "expert_mlp": ("moe_intermediate_size",),
    "shared_mlp": ("shared_expert_intermediate_size",),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
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
_NOT_ROTARY = frozenset({
    *("bloom", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mamba", "mamba2", "mpt", "openai-gpt"),
    *("opt", "rwkv", "xglm"),
})  # fmt: skip
"""Model types whose positions are not rotary, or are rotary without transformers' types of scaling."""
_GGUF_NAMES = {
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
_GGUF_FAMILIES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""Architecture in a GGUF header -> transformers' model type, where they differ."""
_LARGEST_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2**16),
    **dict.fromkeys(("hidden_size", "n_embd", "moe_intermediate_size", "num_labels"), 2**20),
    **dict.fromkeys(("intermediate_size", "n_inner", "shared_expert_intermediate_size"), 2**24),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "sliding_window"), 2**28),
}
"""Keys of config.json with sizes, and the largest accepted: far above any model, and built without end beyond it."""
_REQUIRED_SIZES = {"num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size"}
_MAY_BE_ZERO = {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
                "shared_expert_intermediate_size", "sliding_window"}  # fmt: skip
_SHARES = {"attention_dropout", "hidden_dropout", "embedding_dropout", "residual_dropout", "attn_pdrop", "embd_pdrop",
           "resid_pdrop"}  # fmt: skip
"""Keys with probabilities."""
_NUMBERS = {"rope_theta", "rotary_emb_base", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps",
            "initializer_range", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
            "beta_slow"}  # fmt: skip
"""Keys with finite numbers that are not negative, also within the settings of rotary embeddings."""
_ROPE = ("rope_scaling", "rope_parameters")
_TYPES: dict[str, tuple[type[dict[Any, Any] | list[Any] | bool | str], str]] = {
    **dict.fromkeys(_ROPE, (dict, "must be an object")),
    "layer_types": (list, "must be a list of texts, one per layer"),
    "tie_word_embeddings": (bool, "must be true or false"),
    "model_type": (str, "must be a text"),
}


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
    linear_heads: int | None = None
    """Value heads of linear attention."""
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
    other_layers: tuple[str, ...] = ()
    """transformers' types of layers other than full and sliding attention, of a family for which Meshbook does not know
    how they mix tokens."""
    per_layer_input: int | None = None
    """Width of the inputs that each layer gets from the token ids, beside the hidden states (Gemma 4 E2B); 0: none."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """What is known of config.json, by transformers' keys, with `model.config`."""

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
            option = _sizes_of_option(model.path)
            sizes |= {name: size for name, size in option.items() if sizes[name] is None}
            sizes["config"] = {**option.get("config", {}), **model.config}
        files = locate(model.path)
        if files.gguf_file:
            sizes |= _read_gguf(Path(files.name_or_folder) / files.gguf_file)
        elif files.is_local and (Path(files.name_or_folder) / "config.json").is_file():
            config = _read_config_json(Path(files.name_or_folder) / "config.json")
            raise_all(size_problems(config, f"model.path={model.path}: config.json", model.config))
            sizes["config"] = _flat(config) | model.config
            sizes |= shape_of_config(config) | _shape_of_family(sizes["config"])
            sizes["other_layers"] = _other_layers(sizes["config"])
            if sizes["experts"] is None and _is_dense(config):
                sizes["experts"] = 0
    else:
        sizes |= _shape_of_family(model.config)
        sizes["other_layers"] = _other_layers(model.config)
    raise_all(size_problems({}, "model.config", model.config))
    sizes |= shape_of_config(model.config)
    return ModelShape(**{**sizes, "other_layers": sizes["other_layers"] or ()})


def _sizes_of_option(path: str) -> dict[str, Any]:
    """Return the sizes in the option of conf/model whose model has this path; empty if there is none."""
    names = {field.name for field in fields(ModelShape)}
    for file in sorted((PROJECT / "conf" / "model").glob("*.yaml")):
        text = file.read_text("utf-8")
        if path in text and (values := load_yaml(text)).get("path") == path:
            return {name: value for name, value in values.items() if name in names}
    return {}


def shape_of_built(config: dict[str, Any]) -> ModelShape:
    """Return the sizes of a built model, given its whole Hugging Face config as a dict."""
    sizes = shape_of_config(config) | _shape_of_family(config) | {"config": _flat(config)}
    return ModelShape(**(sizes | ({"experts": 0} if _is_dense(config) else {})))


def _is_dense(config: dict[str, Any]) -> bool:
    return "expert" not in str(config)


def shape_of_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes in a Hugging Face config, given as a dict."""
    values = _flat(config)
    found = {
        size: values[key] for size, keys in CONFIG_NAMES.items() for key in keys if isinstance(values.get(key), int)
    }
    kinds = values.get("layers_block_type") or values.get("hybrid_override_pattern")  # Nemotron-H states no number
    return {"layers": len(kinds)} | found if kinds else found


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config; those of a nested text_config take precedence."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _other_layers(config: dict[str, Any]) -> tuple[str, ...]:
    values = _flat(config)
    if values.get("model_type") in MIXERS:
        return ()
    kinds = {str(each) for each in values.get("layer_types") or ()}
    return tuple(sorted(kinds - {"full_attention", "sliding_attention"}))


def _shape_of_family(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that follow from the model type."""
    kind: str | None = config.get("model_type")
    shape: dict[str, Any] = {} if kind is None else {"family": kind}
    if kind in DENSE:
        shape["experts"] = 0
    if kind in _NOT_ROTARY:
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
                size = _GGUF_NAMES.get(key.partition(".")[2])
                if size and isinstance(value, int):
                    shape[size] = value
                if key == "general.architecture":
                    architecture = str(value)
            shape.setdefault("experts", 0)
            shape["family"] = _GGUF_FAMILIES.get(architecture, architecture)
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


def size_problems(config: Mapping[str, Any], given: str, overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Return the problems of the numbers in a Hugging Face config and in its text_config, in the model's terms.

    Args:
        given: Where the values are from, such as `model.path=PATH: config.json`.
        overrides: Values of model.config, which replace those of `config`.
    """
    overrides = overrides or {}
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        return [f"{given}: text_config={_short(nested)}: must be an object"]
    values = {**config, **(nested or {}), **overrides}

    def named(key: str) -> str:
        return f"{'model.config.' if key in overrides else f'{given}: '}{key}={_short(values[key])}"

    if "kv_lora_rank" in values and values.get("head_dim") == 0:
        del values["head_dim"]  # of latent attention, whose heads have other sizes
    problems = [f"{named(key)}: {rule}" for key in values if (rule := _broken_rule(key, values[key]))]
    if problems:
        return problems
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        problems.append(f"{named('num_key_value_heads')}: must divide num_attention_heads={heads}")
    experts = next((values[key] for key in CONFIG_NAMES["experts"] if values.get(key)), 0)
    chosen = values.get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(chosen, int) and experts and not 0 < chosen <= experts:
        problems.append(f"{named('num_experts_per_tok')}: must be a whole number from 1 to {experts}, all experts")
    layers, kinds = values.get("num_hidden_layers"), values.get("layer_types")
    is_cut = "num_hidden_layers" in overrides and "layer_types" not in overrides  # to its first layers
    if isinstance(layers, int) and kinds is not None and (len(kinds) < layers if is_cut else len(kinds) != layers):
        problems.append(f"{named('layer_types')}: has {len(kinds)} entries; it must have num_hidden_layers={layers}")
    return problems


def _broken_rule(key: str, value: Any) -> str | None:
    """Return the rule that the value of a key of config.json breaks, or None."""
    if value is None:
        return "must be a whole number" if key in _REQUIRED_SIZES else None
    if key in _LARGEST_SIZES:
        least, most = int(key not in _MAY_BE_ZERO), _LARGEST_SIZES[key]
        sizes = value if isinstance(value, list) and value and key not in _REQUIRED_SIZES else [value]
        is_size = all(size is None or (type(size) is int and least <= size <= most) for size in sizes)
        return None if is_size else f"must be a whole number from {least} to {most:,}"
    if key in _NUMBERS | _SHARES:
        is_number = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf
        if key in _SHARES:
            return None if is_number and value <= 1 else "must be a number from 0 to 1"
        return None if is_number else "must be a finite number of at least 0"
    if key in _TYPES:
        kind, rule = _TYPES[key]
        has_others = isinstance(value, list) and not all(isinstance(each, str) for each in value)
        if has_others or not isinstance(value, kind):
            return rule
    if key in _ROPE:
        nested = [each for entry in value.values() if isinstance(entry, dict) for each in entry.items()]
        rules = ((name, entry, _broken_rule(name, entry)) for name, entry in [*value.items(), *nested])
        return next((f"its {name}={_short(entry)} {rule}" for name, entry, rule in rules if rule), None)
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class AttentionLayout(StrEnum):
    """Distribution of attention heads over the tp axis."""

    sharded = "sharded"
    kv_replicated = "kv_replicated"
    replicated = "replicated"


def attention_layout(heads: int, kv_heads: int, tp: int) -> AttentionLayout:
    """Return how query heads and key/value heads are distributed over `tp` ranks.

    sharded: tp divides both counts. kv_replicated: tp divides the query heads and is a multiple of the kv heads, each
    of which is replicated on tp / kv_heads ranks. replicated: otherwise; every rank computes all heads."""
    if heads % tp == 0 and kv_heads % tp == 0:
        return AttentionLayout.sharded
    if heads % tp == 0 and tp % kv_heads == 0:
        return AttentionLayout.kv_replicated
    return AttentionLayout.replicated


def local_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Return the number of query heads and of kv heads that a tp rank computes."""
    if attention_layout(heads, kv_heads, tp) == AttentionLayout.replicated:
        return heads, kv_heads
    return heads // tp, max(kv_heads // tp, 1)


def ulysses_divides(heads: int, kv_heads: int, cp: int) -> bool:
    """Return whether the heads of a rank can be sharded evenly over cp, with kv heads repeated if they are too few."""
    return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the decoder layers of each pipeline stage, as even as possible, with extra layers on the middle stages.

    The first stage also holds the embedding and the last the LM head, so these two get the smaller share.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    sizes = [base + (stage in middle_first[:extra]) for stage in range(stages)]
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
