"""Linear layers whose products are computed in float8, by torchao; weights, gradients and all else stay as they are.

tensorwise: one scale for each operand, the fastest; rowwise: a scale for each row and column, closer to what bfloat16
gives. Scales are of the operands themselves, made anew each time (dynamic).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.config.errors import ConfigError
from components.config.schema.model import Float8, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MULTIPLE = 16
"""Inputs and outputs of a layer must be multiples of this: torch's float8 products take no others."""
CAPABILITY = (8, 9)
"""Of the CUDA devices that have float8 products: Ada, Hopper and later."""


def use_float8(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Let a model's linear layers compute in float8, in place, as `cfg.float8` says; the output head never does.

    Before the model is laid over the mesh, usually on the meta device. Names and parameters stay as they are.

    Raises ConfigError where torchao is missing, this machine has no float8 products, or no layer has fitting sizes.
    """
    if cfg.float8 == Float8.none:
        return
    key = f"model.float8={cfg.float8}"
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{key}: install the extra first: pip install 'meshbook[quantization]'")
    if not cfg.float8_emulate and not _has_products():
        raise ConfigError(
            f"{key}: needs a CUDA device of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and this is "
            f"{_device()}; set model.float8=none (model.float8_emulate=true shows its rounding anywhere, slowly)"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The gradient of a weight is a product over tokens, of which there may be any number.
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(str(cfg.float8)), emulate=cfg.float8_emulate, pad_inner_dim=True
    )
    head = model.get_output_embeddings()
    convert_to_float8_training(model, config=settings, module_filter_fn=lambda module, _: _fits(module, head))
    if not float8_layers(model):
        raise ConfigError(
            f"{key}: no linear layer of {type(model).__name__} has inputs and outputs that are multiples of "
            f"{MULTIPLE}; set model.float8=none"
        )


def float8_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that compute in float8."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [module for module in linear if type(module).__name__ == "Float8Linear"]


@contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Within the context these layers compute as any linear layer does."""
    layers = float8_layers(model)
    for layer in layers:
        layer.forward = partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _fits(module: nn.Module, head: nn.Module | None) -> bool:
    return (
        type(module) is nn.Linear
        and module is not head
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    )


def _has_products() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= CAPABILITY


def _device() -> str:
    if not torch.cuda.is_available():
        return "a machine without one"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} of {major}.{minor}"
