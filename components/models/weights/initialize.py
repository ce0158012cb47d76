"""Random weights that are the same on every mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.config.errors import ConfigError
from components.models.meta_copy import meta_twin
from components.models.weights.nf4 import fill_or_pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, seed: int) -> None:
    """Set every parameter by the rule of its transformers class (adapters have none), random by (`seed`, its name).

    Values are drawn on the CPU in float32 as one full parameter at a time, whatever the mesh and the dtype, so
    they depend on the seed, the name and the global shape alone. The global random state is left as it was.

    Raises:
        ConfigError: The class has no rule for one of its parameters.
    """
    twin = meta_twin(model, dtype=torch.float32)
    known = dict(twin.named_parameters(remove_duplicate=False))
    with torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            if name in known:
                drawn = drawn_weight(twin, name, seed)
                fill_or_pack(parameter, name, drawn.__getitem__, drawn.shape)


def drawn_weight(twin: PreTrainedModel, name: str, seed: int) -> torch.Tensor:
    """Return what `initialize_weights` sets a parameter to, whole and in float32; the random state is another then.

    twin: From `meta_twin`, in float32. Raises ConfigError like `initialize_weights`.
    """
    values = _draw(twin, name, seed)
    if values.isnan().any():
        raise ConfigError(
            f"model.init=random: {type(twin).__name__} has no initialisation for {name}; set model.init=pretrained"
        )
    return values


def _draw(twin: PreTrainedModel, name: str, seed: int) -> torch.Tensor:
    """Make one parameter of the twin real and let the modules around it initialise it."""
    path, _, attribute = name.rpartition(".")
    owner = twin.get_submodule(path)
    placeholder = owner.get_parameter(attribute)
    real = nn.Parameter(torch.full(placeholder.shape, float("nan"), dtype=torch.float32, device="cpu"))
    owner.register_parameter(attribute, real)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    for model, module in _enclosing(twin, path):
        # The other parameters are on the meta device, where drawing does nothing.
        model._init_weights(module)
    owner.register_parameter(attribute, placeholder)
    return real.detach()


def _enclosing(twin: PreTrainedModel, path: str) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield the module at `path` and those around it, inner first, each with the model whose rules it follows."""
    from transformers import PreTrainedModel as Base

    chain: list[tuple[PreTrainedModel, nn.Module]] = [(twin, twin)]
    for name in path.split(".") if path else []:
        module = chain[-1][1].get_submodule(name)
        chain.append((module if isinstance(module, Base) else chain[-1][0], module))
    yield from reversed(chain)
