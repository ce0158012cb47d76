"""Build a model without memory or weights: its config from wherever it is, its modules on the meta device."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.errors import ConfigError
from components.config.model_files import ModelFiles, locate
from components.config.schema.model import Attention, DType, ModelConfig
from components.config.shape import ModelShape, shape_of_config
from components.dtypes import torch_dtype
from components.models.attention import use_causal_sdpa
from components.models.float8 import use_float8
from components.models.tokenizer import load_tokenizer
from components.models.weights.gguf import read_config
from components.models.weights.hub_files import explain_loading_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

VOCAB_MULTIPLE = 8
"""A vocabulary made from a tokenizer is rounded up to this: tensor cores and tensor parallelism divide it."""

OTHER_KEYS = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "rope_theta": "model.config.rope_parameters",
    "rope_scaling": "model.config.rope_parameters",
}
"""Keys that people know from config.json files -> where it is said here."""


def build_on_meta(cfg: ModelConfig, vocab_size: int | None = None) -> PreTrainedModel:
    """Return the causal LM on the meta device, in training mode, its parameters of `cfg.dtype`.

    Nothing is allocated or read but the config; tied parameters are tied. `cfg.config` replaces values of the
    model's own config.

    Args:
        vocab_size: Tokens of the tokenizer. A model from scratch whose config names no vocabulary gets these,
            rounded up to a multiple of 8 (null: the tokenizer is loaded to count them).

    Raises:
        ConfigError: The model is unknown, missing, not reachable, quantised, needs code that is not trusted,
            cannot hold the tokenizer's tokens, or `cfg.config` has a key or value that its class does not take.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(cfg, vocab_size)
    held = config.get_text_config().vocab_size
    if vocab_size is not None and vocab_size > held:
        raise ConfigError(
            f"model.config.vocab_size={held}: the tokenizer has {vocab_size} tokens; set it to {vocab_size} or "
            "more, or set model.tokenizer to the model's own"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch_dtype(cfg.dtype),
                attn_implementation="sdpa" if cfg.attention == Attention.sdpa_flash else str(cfg.attention),
                trust_remote_code=cfg.trust_remote_code,
            )
    except ImportError as error:
        raise ConfigError(
            f"model.attention={cfg.attention}: {_first_line(error)}; install it or set model.attention=sdpa"
        ) from error
    except ValueError as error:
        raise ConfigError(_why_not_built(cfg, config.model_type, _first_line(error))) from error
    _load_generation_config(model, cfg)
    model.config.use_cache = False
    if DType.float64 in (cfg.dtype, cfg.compute_dtype):
        model.set_experts_implementation("eager")  # torch's grouped matrix products have no float64
    use_float8(model, cfg)
    if not use_causal_sdpa(model, flash=cfg.attention == Attention.sdpa_flash):
        logger.info("attention: %s with transformers' own masks; the host waits once per forward", cfg.attention)
    return model.train()


def _why_not_built(cfg: ModelConfig, model_type: str, said: str) -> str:
    if "does not support" in said and cfg.attention != Attention.eager:
        return f"model.attention={cfg.attention}: {model_type} of transformers has none; set model.attention=eager"
    built = f"{model_type} with model.attention={cfg.attention}"
    return f"model.path={cfg.path}: {built} cannot be built as a causal LM: {said}"


def model_shape(model: PreTrainedModel | PreTrainedConfig) -> ModelShape:
    """Return the numbers that decide what a mesh can divide, from the model itself: for the second validation."""
    whole = model.config if isinstance(model, nn.Module) else model
    config = whole.get_text_config()
    known: dict[str, Any] = shape_of_config(config.to_dict())
    # Models without grouped heads have no such key: every head is its own.
    known.setdefault("kv_heads", known.get("heads"))
    return ModelShape(**known)


def load_config(cfg: ModelConfig, vocab_size: int | None = None) -> PreTrainedConfig:
    """Return the Hugging Face config of `cfg`, its values replaced by those of `cfg.config`; see `build_on_meta`."""
    from huggingface_hub.errors import StrictDataclassError

    overrides = dict(cfg.config)
    if cfg.path is None:
        if "vocab_size" not in overrides:
            overrides["vocab_size"] = _vocabulary_for(vocab_size or len(load_tokenizer(cfg)))
        values: dict[str, Any] = {}
        cls = _class_of(overrides["model_type"], "model.config.model_type")
    else:
        values, cls = _read_values(cfg, locate(cfg.path))
        _refuse_quantised(values, cfg.path)
    _check_keys(overrides, cls)
    if "num_hidden_layers" in overrides and "layer_types" in values and "layer_types" not in overrides:
        overrides["layer_types"] = values["layer_types"][: overrides["num_hidden_layers"]]
    try:
        return cls.from_dict({**values, **overrides})
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model.config: {cls.__name__} refuses it: {' '.join(str(error).split())}") from error


def _read_values(cfg: ModelConfig, files: ModelFiles) -> tuple[dict[str, Any], type[PreTrainedConfig]]:
    from transformers import AutoConfig, PreTrainedConfig

    if files.gguf_file:
        values = read_config(Path(files.name_or_folder) / files.gguf_file)
        return values, _class_of(values["model_type"], "model.path")
    try:
        config = AutoConfig.from_pretrained(
            files.name_or_folder, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
        # The file's own values: those that its class derives must be derived again from the replaced ones.
        values, _ = PreTrainedConfig.get_config_dict(files.name_or_folder, revision=cfg.revision)
    except (OSError, ValueError, KeyError) as error:
        raise explain_loading_error(error, files, "model.path", "config") from error
    return values, type(config)


def _class_of(model_type: str, key: str) -> type[PreTrainedConfig]:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{key}={model_type}: transformers knows no such model type{_nearest(model_type, list(CONFIG_MAPPING))}"
        )
    return CONFIG_MAPPING[model_type]


def _check_keys(overrides: dict[str, Any], cls: type[PreTrainedConfig]) -> None:
    known = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    known += [*cls.attribute_map, "model_type"]
    problems = []
    for key, value in overrides.items():
        if key in OTHER_KEYS:
            problems.append(f"model.config.{key}={value}: set {OTHER_KEYS[key]} instead")
        elif key not in known:
            problems.append(f"model.config.{key}={value}: {cls.__name__} has no such key{_nearest(key, known)}")
    if overrides.get("model_type", cls.model_type) != cls.model_type:
        problems.append(
            f"model.config.model_type={overrides['model_type']}: the model of model.path is a {cls.model_type}; "
            "leave it out, or set model.path=null to build from scratch"
        )
    if problems:
        raise ConfigError(problems)


def _refuse_quantised(values: dict[str, Any], path: str) -> None:
    quantisation = values.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "an unnamed method")
        raise ConfigError(
            f"model.path={path}: its weights are quantised ({method}) and cannot be trained; set model.path to the "
            "unquantised model"
        )


def _vocabulary_for(tokens: int) -> int:
    rounded = -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    logger.info("model.config.vocab_size: %d, the tokenizer's %d tokens rounded up", rounded, tokens)
    return rounded


def _load_generation_config(model: PreTrainedModel, cfg: ModelConfig) -> None:
    from transformers import GenerationConfig

    files = locate(cfg.path) if cfg.path is not None else None
    if files is None or files.gguf_file:
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            files.name_or_folder, revision=cfg.revision or "main"
        )
    except OSError:
        logger.info("%s has no generation_config.json: the one derived from its config is used", cfg.path)


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
