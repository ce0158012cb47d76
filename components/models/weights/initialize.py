"""Random weight initialization that is identical on every mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.config.errors import ConfigError
from components.models.anatomy import is_transposed
from components.models.meta_copy import meta_copy
from components.models.quantization.nf4 import fill_or_pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, seed: int, names: Collection[str] | None = None) -> None:
    """Initialize every parameter by its transformers class, from a random state that depends on (`seed`, its name).

    Each full parameter is drawn on the CPU in float32, one at a time, so values depend only on the seed, the name and
    the global shape, not on the mesh or the dtype. Adapters are skipped. The global random state does not change.

    Args:
        names: Parameters to initialize; None: all.

    Raises:
        ConfigError: The class does not initialize one of its parameters.
    """
    meta_model = meta_copy(model, dtype=torch.float32)
    initialized = dict(meta_model.named_parameters(remove_duplicate=False))
    with torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            if name in initialized and (names is None or name in names):
                drawn = drawn_weight(meta_model, name, seed)
                transposed = is_transposed(meta_model.get_submodule(name.rpartition(".")[0]))
                fill_or_pack(parameter, name, drawn.__getitem__, drawn.shape, transposed=transposed)


def drawn_weight(meta_model: PreTrainedModel, name: str, seed: int) -> torch.Tensor:
    """Return the full float32 value that `initialize_weights` gives a parameter; reseeds the global generator.

    meta_model: From `meta_copy`, in float32. Raises ConfigError like `initialize_weights`.
    """
    values = _draw(meta_model, name, seed)
    if values.isnan().any():
        raise ConfigError(
            f"model.init=random: {type(meta_model).__name__} has no initialization for {name}; set "
            "model.init=pretrained"
        )
    return values


def _draw(meta_model: PreTrainedModel, name: str, seed: int) -> torch.Tensor:
    """Materialize one parameter of the meta model, and run `_init_weights` of the modules that contain it."""
    path, _, attribute = name.rpartition(".")
    owner = meta_model.get_submodule(path)
    placeholder = owner.get_parameter(attribute)
    real = nn.Parameter(torch.full(placeholder.shape, float("nan"), dtype=torch.float32, device="cpu"))
    owner.register_parameter(attribute, real)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    for model, module in _enclosing(meta_model, path):
        # All other parameters are on the meta device, where initialization draws no random numbers.
        model._init_weights(module)
    owner.register_parameter(attribute, placeholder)
    return real.detach()


def _enclosing(meta_model: PreTrainedModel, path: str) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield the module at `path` and those that contain it, innermost first, each with its nearest PreTrainedModel."""
    from transformers import PreTrainedModel as Base

    chain: list[tuple[PreTrainedModel, nn.Module]] = [(meta_model, meta_model)]
    for name in path.split(".") if path else []:
        module = chain[-1][1].get_submodule(name)
        chain.append((module if isinstance(module, Base) else chain[-1][0], module))
    yield from reversed(chain)
