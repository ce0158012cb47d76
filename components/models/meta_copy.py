"""A model's twin: the same class and config, undivided and without memory for its parameters.

Tensor parallelism and FSDP replace parameters and classes of the model itself; its twin still shows what
transformers made: names, global shapes, initialisation rules and the values of buffers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from components.models.anatomy import own_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def meta_twin(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the twin on the meta device, with parameters of `dtype` (None: the model's)."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        return own_class(model)._from_config(config, dtype=dtype or config.dtype)


def buffer_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return the twin whose buffers are real and on the CPU, as the constructor computes them."""
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        return own_class(model)._from_config(copy.deepcopy(model.config))


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty`, which allocates the parameters, goes to the meta device; buffers are computed from values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
