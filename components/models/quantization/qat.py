"""Quantization-aware training: linear layers of the decoder compute with fake-quantized weights, by torchao.

The forward rounds weights, and under int8_int4 activations, to the values that they have after quantization; the
backward passes gradients through the rounding. Parameters keep their dtype and names, so checkpoints and exports hold
ordinary weights, which torchao quantizes with the same config (`quantized_config`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from components.config.errors import ConfigError
from components.config.rules.compute_rules import torchao_problems
from components.config.schema.checks import raise_all
from components.config.schema.model import ModelConfig, Qat
from components.dtypes import torch_dtype
from components.models.anatomy import read_anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_qat(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Replace the linear layers of a model's decoder by fake-quantized ones in place; never the LM head.

    Call it before the model is sharded, usually on the meta device. Fused experts are not linear layers and stay.

    Raises ConfigError if torchao is missing, or the inputs of a layer are no multiple of the group size.
    """
    if cfg.qat == Qat.none:
        return
    raise_all(torchao_problems(f"model.qat={cfg.qat}"))
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    layers = read_anatomy(model).decoder_layers(model)
    linear = {
        f"{path}.{name}": module
        for path, layer in layers.items()
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
    }
    if not linear:
        raise ConfigError(f"model.qat={cfg.qat}: {type(model).__name__} has no linear layers; set model.qat=none")
    for name, module in linear.items():
        if module.in_features % cfg.qat_group_size:
            raise ConfigError(
                f"model.qat_group_size={cfg.qat_group_size}: does not divide the {module.in_features} inputs of "
                f"{name}; set it to a divisor, such as 32"
            )
    prepare = QATConfig(quantized_config(cfg), step="prepare")
    chosen = set(linear.values())
    quantize_(model, prepare, filter_fn=lambda module, _: module in chosen)


def quantized_config(cfg: ModelConfig) -> Any:
    """Return torchao's config that quantizes the weights trained with `cfg`."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, PerGroup

    if cfg.qat == Qat.int8_int4:
        groups = PerGroup(cfg.qat_group_size)
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch_dtype("int4"), weight_granularity=groups)
    return Int4WeightOnlyConfig(group_size=cfg.qat_group_size)
