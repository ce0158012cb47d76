"""Scaled rotary position embeddings (model.rope): the parameters in a model's config that extend its context."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from components.config.errors import ConfigError
from components.config.schema.model import RopeConfig, RopeType

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

KEPT = ("rope_theta", "partial_rotary_factor")
"""Rope parameters of the model that scaling does not change."""
REPLACED = ("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
            "beta_slow", "low_freq_factor", "high_freq_factor")  # fmt: skip
"""Rope parameters that describe the scaling."""


def scale_rope(config: PreTrainedConfig, rope: RopeConfig) -> None:
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
    if further := [name for name in own if name not in (*KEPT, *REPLACED)]:
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
    scaled = {name: own[name] for name in KEPT if name in own} | _parameters(rope, original)
    if hasattr(text, "original_max_position_embeddings"):  # Phi-3's takes precedence over that in rope_parameters
        text.original_max_position_embeddings = original
    text.max_position_embeddings = length
    text.rope_parameters = scaled
    text.standardize_rope_params()
    text.validate_rope()
    logger.info("model.rope: %s, context of %d tokens extended to %d", rope.type, original, length)


def check_rope(model: PreTrainedModel, rope: RopeConfig) -> None:
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
