"""Models built on the meta device, without memory or weights, from any source of their config; scaled RoPE."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.model_files import QUANTIZATION_KEYS, ModelFiles, locate, read_quantization
from components.config.schema.model import Attention, DType, ModelConfig, RopeConfig, RopeType, WeightInit
from components.config.shape import ModelShape, shape_of_config, size_problems
from components.models.anatomy import encoder_parameters
from components.models.attention import use_causal_sdpa
from components.models.classifier import return_token_scores, set_labels
from components.models.layers import cast_experts, keep_float32
from components.models.quantization import use_float8, use_qat
from components.models.tokenizer import error_line, explain_loading_error, load_tokenizer
from components.models.weights.quantized_files import quantization_of
from components.models.weights.weight_sources import read_config
from components.protocol.errors import ConfigError, raise_all
from components.torch_kernels import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)
_VOCAB_MULTIPLE = 8
"""A vocabulary size derived from a tokenizer is rounded up to this, for tensor cores and tensor parallelism."""
IMAGE_TEXT = (
    *("cohere2_vision", "glm4v", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
    "smolvlm",
)
"""Model types that transformers builds only together with an encoder of images, and that are tested on text."""
_POSITIONS = re.compile(r"pos|wpe")
"""Names of tables of position embeddings."""
BUILT_FROM = "built_from"
"""Attribute of a model: the ModelConfig that it was built from. Exports copy from its files what is not trained."""
DECODED_FROM = "decoded_from"
"""Attribute of a model: the format of its quantized weights, which are decoded when they are read."""
_OTHER_KEYS = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "rope_theta": "model.config.rope_parameters",
    "rope_scaling": "model.config.rope_parameters",
}
"""Keys of config.json files that are set elsewhere -> the key to set."""
_IGNORED = {
    "nemotron_h": {"num_hidden_layers": "has as many layers as layers_block_type; set model.config.layers_block_type"},
}
"""Model type -> key that the class of the config accepts and ignores -> what to set instead."""
_WRONG_VALUES = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError)
"""What transformers raises for values of a config that it does not check."""
_KEPT = ("rope_theta", "partial_rotary_factor")
"""Rope parameters of the model that scaling does not change."""
_REPLACED = ("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
            "beta_slow", "low_freq_factor", "high_freq_factor")  # fmt: skip
"""Rope parameters that describe the scaling."""


def build_on_meta(
    cfg: ModelConfig, vocab_size: int | None = None, labels: Sequence[str] | None = None
) -> PreTrainedModel:
    """Build the causal LM on the meta device, in training mode, with parameters of `cfg.stored_dtype()`.

    Only the config is read, and no memory is allocated. Tied parameters are tied. `cfg.config` overrides values of the
    model's own config. From then on attention in this process leaves out cuDNN's kernels.

    Args:
        vocab_size: Number of tokens of the tokenizer. It becomes the vocabulary size, rounded up to a multiple of 8,
            of a model from scratch whose config has none. None: load the tokenizer if the number is needed.
        labels: Names of the outputs of a score head, which replaces the LM head (classifier.py); None: a causal LM.

    Raises:
        ConfigError: The model is unknown, missing, unreachable or quantized, it needs code that is not trusted, its
            vocabulary is smaller than the tokenizer's, or its class rejects a key or value of `cfg.config`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    config = load_config(cfg, vocab_size)
    new_rows = _grow_vocabulary(config, cfg, vocab_size)
    listed_by_images = (*IMAGE_TEXT, "mistral4")  # Mistral 4's text model is missing among transformers' causal LMs
    auto_class: Any = AutoModelForImageTextToText if config.model_type in listed_by_images else AutoModelForCausalLM
    if labels is not None:
        set_labels(config, labels)
        auto_class = AutoModelForSequenceClassification
    model_vocab = config.get_text_config().vocab_size
    if vocab_size is not None and vocab_size > model_vocab:
        raise ConfigError(_explain_vocabulary(cfg, model_vocab, vocab_size))
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class.from_config(
                config,
                dtype=torch_dtype(cfg.stored_dtype()),
                attn_implementation="sdpa" if cfg.attention == Attention.sdpa_flash else str(cfg.attention),
                trust_remote_code=cfg.trust_remote_code,
            )
    except ImportError as error:
        raise ConfigError(
            f"model.attention={cfg.attention}: {error_line(error)}; install it or set model.attention=sdpa"
        ) from error
    except (ValueError, *_WRONG_VALUES) as error:
        raise ConfigError(_explain_build_error(cfg, config.model_type, error_line(error), labels)) from error
    # torch prefers them on Hopper and Blackwell. They build a plan for each new length, for up to a second
    # (https://github.com/modelscope/FunASR/issues/3704), and with a mask their backward may return NaN
    # (https://github.com/pytorch/pytorch/issues/196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    keep_float32(model)
    cast_experts()
    if labels is not None:
        return_token_scores(model)
    for name in encoder_parameters(model):  # without a gradient, weight decay would still move them
        model.get_parameter(name).requires_grad_(False)
    for name, module in model.named_modules():
        # Padding has no effect on the loss, and a token that also ends texts must get a gradient where it is read.
        if isinstance(module, nn.Embedding) and not _POSITIONS.search(name):
            module.padding_idx = None
    _load_generation_config(model, cfg)
    model.config.use_cache = False
    if DType.float64 in (cfg.dtype, cfg.compute_dtype):
        model.set_experts_implementation("eager")  # torch's grouped GEMM does not support float64
    _check_rope(model, cfg.rope)
    use_float8(model, cfg)
    use_qat(model, cfg)
    if not use_causal_sdpa(model, flash=cfg.attention == Attention.sdpa_flash):
        logger.info("attention: %s with transformers' own masks; one host sync per forward", cfg.attention)
    model.built_from = cfg  # type: ignore[assignment]
    _set_new_rows(model, new_rows)
    if cfg.path is not None and cfg.init == WeightInit.pretrained:
        quantization = quantization_of(locate(cfg.path), cfg.revision)
        model.decoded_from = None if quantization is None else quantization.method  # type: ignore[assignment]
    return model.train()


def _grow_vocabulary(config: PreTrainedConfig, cfg: ModelConfig, vocab_size: int | None) -> range:
    """Make room for model.new_tokens in a config, and return their ids, which are the tokenizer's last."""
    if not cfg.new_tokens:
        return range(0)
    tokens, text_config = vocab_size or len(load_tokenizer(cfg)), config.get_text_config()
    if text_config.vocab_size < tokens - len(cfg.new_tokens):
        raise ConfigError(_explain_vocabulary(cfg, text_config.vocab_size, tokens - len(cfg.new_tokens)))
    text_config.vocab_size = max(text_config.vocab_size, tokens)
    return range(tokens - len(cfg.new_tokens), tokens)


def _set_new_rows(model: PreTrainedModel, rows: range) -> None:
    """Record the ids of new tokens, which the attribute `new_rows` of a model holds.

    Raises ConfigError if a table besides the input embedding is too small for them.
    """
    model.new_rows = rows  # type: ignore[assignment]
    for name, module in model.named_modules() if rows else ():
        if not isinstance(module, nn.Embedding) or module is model.get_input_embeddings() or _POSITIONS.search(name):
            continue
        if module.num_embeddings < rows.stop and f"{name}.weight" not in encoder_parameters(model):
            raise ConfigError(
                f"model.new_tokens: {type(model).__name__} reads token ids in {name} too, which has "
                f"{module.num_embeddings} rows, fewer than the {rows.stop} tokens; remove model.new_tokens, or choose "
                "another model"
            )


def _explain_vocabulary(cfg: ModelConfig, model_vocab: int, tokens: int) -> str:
    """Return the message for a vocabulary that is smaller than the tokenizer's; the weights of a checkpoint have the
    size of its own."""
    other = f"or set model.tokenizer to one with at most {model_vocab} tokens"
    if cfg.init == WeightInit.random:
        return f"model.config.vocab_size={model_vocab}: the tokenizer has {tokens} tokens; set it to {tokens}, {other}"
    return (
        f"model.path={cfg.path}: its embedding has {model_vocab} rows, but the tokenizer {tokens} tokens; set "
        f"model.tokenizer to the model's own, and model.new_tokens to the tokens that it lacks, {other}"
    )


def _explain_build_error(cfg: ModelConfig, model_type: str, reason: str, labels: Sequence[str] | None) -> str:
    if "does not support" in reason and cfg.attention != Attention.eager:
        return (
            f"model.attention={cfg.attention}: transformers does not implement it for {model_type}; set "
            "model.attention=eager"
        )
    if labels is None and "Unrecognized configuration class" in reason:
        return (
            f"model.path={cfg.path}: transformers has no causal LM for {model_type}; choose another model, with an "
            f"encoder of images one of type {', '.join(IMAGE_TEXT)}, gemma3, gemma4, llama4, mllama or qwen3_5"
        )
    built = f"{model_type} with model.attention={cfg.attention}"
    kind = "causal LM" if labels is None else "model for sequence classification"
    return f"model.path={cfg.path}: {built} cannot be built as a {kind}: {reason}"


def model_shape(model: PreTrainedModel | PreTrainedConfig) -> ModelShape:
    """Return the sizes that a mesh must divide, read from the model itself, for the second validation."""
    full_config = model.config if isinstance(model, nn.Module) else model
    config = full_config.get_text_config()
    sizes: dict[str, Any] = shape_of_config(config.to_dict())
    # Models without grouped-query attention have no such key: there are as many key-value heads as heads.
    sizes.setdefault("kv_heads", sizes.get("heads"))
    return ModelShape(**sizes)


def check_positions(model: PreTrainedModel, key: str, seq_len: int) -> None:
    """Raise ConfigError if rows of `seq_len` tokens, the value of `key`, exceed a table of position embeddings.

    Rotary positions and ALiBi are defined for any length.
    """
    declared = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if declared is None or seq_len <= declared:
        return
    tables = [
        (name, module.num_embeddings) for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    # GPT-J's and CodeGen's tables are not learned, but have an end too.
    tables += [(name, len(table)) for name, table in model.named_buffers() if name.endswith("embed_positions")]
    for name, size in tables:
        # OPT's table begins with two unused rows. Encoders of images have tables of other sizes.
        if _POSITIONS.search(name) and declared <= size <= declared + 2:
            raise ConfigError(
                f"{key}={seq_len}: must be at most {declared}, the number of positions that the model has embeddings "
                f"for; lower {key}"
            )


def load_config(cfg: ModelConfig, vocab_size: int | None = None) -> PreTrainedConfig:
    """Return the Hugging Face config of `cfg.path`, overridden by the values of `cfg.config`.

    Arguments and errors are those of `build_on_meta`.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    overrides = dict(cfg.config)
    if cfg.path is None:
        if "vocab_size" not in overrides:
            overrides["vocab_size"] = _vocabulary_for(vocab_size or len(load_tokenizer(cfg)))
        values: dict[str, Any] = {}
        cls = _class_of(overrides["model_type"], "model.config.model_type")
        text = cls.sub_configs.get("text_config")
        if text is not None and text.model_type in CONFIG_MAPPING:
            raise ConfigError(
                f"model.config.model_type={cls.model_type}: is a text model with encoders; from scratch only the text "
                f"model can be trained; set model.config.model_type={text.model_type}"
            )
    else:
        values, cls = _read_values(cfg, locate(cfg.path))
        values = _without_quantization(values, cfg)
    _check_keys(overrides, values, cls)
    raise_all(size_problems(values, f"model.path={cfg.path}: config.json", overrides))
    if isinstance(layers := overrides.get("num_hidden_layers"), int):
        per_layer = [key for key, value in values.items() if isinstance(value, list) and key not in overrides]
        overrides |= {key: values[key][:layers] for key in per_layer if len(values[key]) == values["num_hidden_layers"]}
    try:
        config = cls.from_dict({**values, **overrides})
    except (StrictDataclassError, ValueError, *_WRONG_VALUES) as error:
        raise ConfigError(f"model.config: {cls.__name__} rejects it: {' '.join(str(error).split())}") from error
    try:
        _scale_rope(config, cfg.rope)
    except (StrictDataclassError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.rope.type={cfg.rope.type}: {cls.__name__} rejects it: {reason}") from error
    return config


def _read_values(cfg: ModelConfig, files: ModelFiles) -> tuple[dict[str, Any], type[PreTrainedConfig]]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    if files.gguf_file:
        values = read_config(Path(files.name_or_folder) / files.gguf_file)
        return values, _class_of(values["model_type"], "model.path")
    try:
        config = AutoConfig.from_pretrained(
            files.name_or_folder, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
        # Only the values in the file: those that the class derives must be derived again after the overrides.
        values, _ = PreTrainedConfig.get_config_dict(files.name_or_folder, revision=cfg.revision)
    except (OSError, ValueError, StrictDataclassError, *_WRONG_VALUES) as error:
        raise explain_loading_error(error, files, "model.path", "config") from error
    return values, type(config)


def _class_of(model_type: str, key: str) -> type[PreTrainedConfig]:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{key}={model_type}: transformers has no such model type{_nearest(model_type, list(CONFIG_MAPPING))}"
        )
    return CONFIG_MAPPING[model_type]


def _check_keys(overrides: dict[str, Any], values: dict[str, Any], cls: type[PreTrainedConfig]) -> None:
    """Raise ConfigError for keys of `model.config` that the class of the config does not read.

    A class stores any key, so storing it shows nothing. Besides its fields it reads keys of published files, such as
    Qwen 3.5's `full_attention_interval`, which change other values of the config.
    """
    valid = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    valid += [*cls.attribute_map, *cls.attribute_map.values(), "model_type"]
    problems = []
    for key, value in overrides.items():
        if key in _OTHER_KEYS:
            problems.append(f"model.config.{key}={value}: set {_OTHER_KEYS[key]} instead")
        elif key in _IGNORED.get(cls.model_type, {}):
            problems.append(f"model.config.{key}={value}: {cls.__name__} {_IGNORED[cls.model_type][key]}")
        elif key in valid or (key == "head_dim" and _reads_head_dim(cls)) or _changes(key, overrides, values, cls):
            continue
        elif nearest := _nearest(key, valid):
            problems.append(f"model.config.{key}={value}: {cls.__name__} has no such key{nearest}")
        else:
            problems.append(f"model.config.{key}={value}: {cls.__name__} does not read this key; remove it")
    if overrides.get("model_type", cls.model_type) != cls.model_type:
        problems.append(
            f"model.config.model_type={overrides['model_type']}: the model at model.path is of type {cls.model_type}; "
            "remove the key, or set model.path=null to build from scratch"
        )
    if problems:
        raise ConfigError(problems)


def _changes(key: str, overrides: dict[str, Any], values: dict[str, Any], cls: type[PreTrainedConfig]) -> bool:
    """Return whether a key changes another value of a config, is rejected by it, or says what the file says otherwise.

    A pattern changes nothing beside the list of layers that follows from it, if both agree.
    """
    from huggingface_hub.errors import StrictDataclassError

    def derived(config: dict[str, Any]) -> set[str]:
        """Return the names of the values that change with the key, in a config that has it."""
        without = cls.from_dict({name: value for name, value in config.items() if name != key}).to_dict()
        built = cls.from_dict(config).to_dict()
        return {name for name, value in without.items() if name != key and built.get(name) != value}

    value, actual = overrides[key], {**values, **overrides}
    # By itself too, and with another number: a value that is the default changes nothing.
    others = [
        {**known, key: each}
        for known in (overrides, {})
        for each in (value, value + 1 if type(value) is int else value)
    ]
    try:
        if derived(actual):
            return True
        names = next(filter(None, map(derived, others)), set())
        stated = cls.from_dict({**{name: each for name, each in values.items() if name not in names}, **overrides})
        both = (stated.to_dict(), cls.from_dict(actual).to_dict())
    except (StrictDataclassError, ValueError, *_WRONG_VALUES):  # reported when the config itself is built
        return True
    return bool(names) and all(both[0].get(name) == both[1].get(name) for name in names)


def _reads_head_dim(cls: type[PreTrainedConfig]) -> bool:
    """Return whether a family's attention reads `head_dim` although its config does not declare it (Qwen2, OLMo 2)."""
    try:
        spec = importlib.util.find_spec(cls.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    return 'self.head_dim = getattr(config, "head_dim"' in Path(spec.origin).read_text("utf-8")


def _without_quantization(values: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Return a config of a model whose weights are decoded. Raises ConfigError if their format is not read."""
    if cfg.init == WeightInit.pretrained:
        read_quantization(values, f"model.path={cfg.path}")
    plain = {key: value for key, value in values.items() if key not in QUANTIZATION_KEYS}
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = {key: value for key, value in text.items() if key not in QUANTIZATION_KEYS}
    return plain


def _vocabulary_for(tokens: int) -> int:
    rounded = -(-tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    logger.info("model.config.vocab_size=%d: the tokenizer's %d tokens, rounded up", rounded, tokens)
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
    except (ValueError, *_WRONG_VALUES) as error:
        raise explain_loading_error(error, files, "model.path", "generation config") from error
    except OSError:
        logger.info("%s has no generation_config.json: using the values derived from its config", cfg.path)
    ends: Any = model.generation_config.eos_token_id
    if not all(isinstance(end, int | None) for end in (ends if isinstance(ends, list) else [ends])):
        raise ConfigError(
            f"model.path={cfg.path}: generation_config.json: eos_token_id={ends!r}: must be a token id or a list"
        )


def _nearest(name: str, candidates: list[str]) -> str:
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _scale_rope(config: PreTrainedConfig, rope: RopeConfig) -> None:
    """Replace the scaling in a config's `rope_parameters` by `rope`, and raise its `max_position_embeddings`.

    Raises:
        ConfigError: The model has no rope parameters, or different ones per layer, or further ones that belong to its
            own scaling; it is scaled already and the original length is not set; or the new context is shorter.
    """
    if rope.type is RopeType.none:
        return
    key, text = f"model.rope.type={rope.type}", config.get_text_config()
    own: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if not own or getattr(text, "alibi", False):
        raise ConfigError(
            f"{key}: {type(text).__name__} has no rotary position embeddings that transformers can scale; set "
            "model/rope=none, or choose another model"
        )
    if any(isinstance(value, dict) for value in own.values()):
        raise ConfigError(
            f"{key}: the layers of {type(text).__name__} have different rotary position embeddings "
            f"({', '.join(own)}); set model/rope=none and model.config.rope_parameters to the parameters of each"
        )
    if further := [name for name in own if name not in (*_KEPT, *_REPLACED)]:
        raise ConfigError(
            f"{key}: the model's own scaling ({own.get('rope_type')}) also has {', '.join(further)}; set "
            "model/rope=none and model.config.rope_parameters to the complete parameters"
        )
    original = rope.original_max_position_embeddings
    if original is None and own.get("rope_type", "default") != "default":
        trained = own.get("original_max_position_embeddings", "the length it was pretrained with")
        raise ConfigError(
            f"model.rope.original_max_position_embeddings=null: the model's positions are scaled already "
            f"({own['rope_type']}, from {trained} to {text.max_position_embeddings}); set it to the context length "
            "that model.rope.factor multiplies"
        )
    before, original = text.max_position_embeddings, original or text.max_position_embeddings
    length = round(original * (rope.factor or 1))
    if length < before:
        raise ConfigError(
            f"model.rope.factor={rope.factor}: gives a context of {original} x {rope.factor:g} = {length} tokens, less "
            f"than the model's own {before}; set a larger model.rope.factor"
        )
    scaled = {name: own[name] for name in _KEPT if name in own} | _parameters(rope, original)
    if hasattr(text, "original_max_position_embeddings"):  # Phi-3's takes precedence over that in rope_parameters
        text.original_max_position_embeddings = original
    text.max_position_embeddings = length
    text.rope_parameters = scaled
    text.standardize_rope_params()
    text.validate_rope()
    logger.info("model.rope: %s, context of %d tokens extended to %d", rope.type, original, length)


def _check_rope(model: PreTrainedModel, rope: RopeConfig) -> None:
    """Raise ConfigError if no module of the model computes rotary frequencies of the requested type."""
    if rope.type is RopeType.none:
        return
    if not any(getattr(module, "rope_type", None) == str(rope.type) for module in model.modules()):
        raise ConfigError(
            f"model.rope.type={rope.type}: {type(model).__name__} does not use the rope parameters of its config; set "
            "model/rope=none, or choose another model"
        )


def _parameters(rope: RopeConfig, original: int) -> dict[str, Any]:
    """Return the parameters of the scaling, under their names in transformers."""
    parameters: dict[str, Any] = {"rope_type": str(rope.type), "factor": rope.factor}
    if rope.type is RopeType.linear:
        return parameters
    parameters["original_max_position_embeddings"] = original
    if rope.type is RopeType.llama3:
        low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 4.0
        return parameters | {"low_freq_factor": low, "high_freq_factor": high}
    optional = {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
    }
    return parameters | {name: value for name, value in optional.items() if value is not None}
