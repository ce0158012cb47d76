"""Linear layers that compute in float8 or with fake-quantized weights (QAT), by torchao; parameters keep their dtype.

float8: GEMMs have float8 operands, gradients and all other operations keep their dtype. tensorwise: one scale per
operand, the fastest. rowwise: one scale per row and column, numerically closer to bfloat16. Scaling is dynamic: scales
are computed from the operands of each GEMM.

Quantization-aware training: the forward rounds weights, and under int8_int4 activations, to the values that they have
after quantization; the backward passes gradients through the rounding. Parameters keep their names too, so checkpoints
and exports hold ordinary weights, which torchao quantizes with the same config (`quantized_config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.compute_rules import torchao_problems
from components.config.schema.checks import raise_all
from components.config.schema.model import Float8, ModelConfig, Qat
from components.dtypes import torch_dtype
from components.models.anatomy import encoder_parameters, read_anatomy
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MULTIPLE = 16
"""Inputs and outputs of a layer must be multiples of this, as torch's float8 GEMM requires."""
_CAPABILITY = (8, 9)
"""Minimum CUDA compute capability for float8 GEMMs: Ada, Hopper and later."""


def use_float8(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Convert a model's linear layers to float8 GEMMs in place, with the recipe `cfg.float8`; never the LM head.

    Call it before the model is sharded, usually on the meta device. Names and parameters do not change.

    Raises ConfigError if torchao is missing, this machine has no float8 GEMM, or no layer has suitable sizes.
    """
    if cfg.float8 == Float8.none:
        return
    key = f"model.float8={cfg.float8}"
    raise_all(torchao_problems(key))
    if not cfg.float8_emulate and not _has_float8_gemm():
        raise ConfigError(
            f"{key}: needs a CUDA device of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher, but this "
            f"is {_device()}; set model.float8=none (model.float8_emulate=true emulates the rounding anywhere, slowly)"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The GEMM of a weight's gradient sums over tokens, whose number need not be a multiple of 16: pad that dim.
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(str(cfg.float8)), emulate=cfg.float8_emulate, pad_inner_dim=True
    )
    head, unused = model.get_output_embeddings(), encoder_parameters(model)
    convert_to_float8_training(
        model,
        config=settings,
        module_filter_fn=lambda module, name: f"{name}.weight" not in unused and _is_convertible(module, head),
    )
    if not float8_layers(model):
        raise ConfigError(
            f"{key}: no linear layer of {type(model).__name__} has inputs and outputs that are multiples of "
            f"{_MULTIPLE}; set model.float8=none"
        )


def float8_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers converted by `use_float8`."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [module for module in linear if type(module).__name__ == "Float8Linear"]


@contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Context in which float8 layers compute like ordinary linear layers."""
    layers = float8_layers(model)
    for layer in layers:
        layer.forward = partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_convertible(module: nn.Module, head: nn.Module | None) -> bool:
    return (
        type(module) is nn.Linear
        and module is not head
        and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
    )


def _has_float8_gemm() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= _CAPABILITY


def _device() -> str:
    if not torch.cuda.is_available():
        return "a machine without CUDA"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} of compute capability {major}.{minor}"


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
