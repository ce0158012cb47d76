"""Copies of a model as transformers builds it: same class and config, unsharded, without memory for parameters.

Tensor parallelism and FSDP replace a model's parameters and class. A copy still provides the original names, global
shapes, initialization rules and buffer values.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from components.models.anatomy import transformers_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def meta_copy(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the copy on the meta device, with parameters of `dtype` (None: the model's dtype)."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        return transformers_class(model)._from_config(config, dtype=dtype or config.dtype)


def copy_with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Build the copy with parameters on the meta device, and buffers on the CPU as the constructor computes them."""
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        return transformers_class(model)._from_config(copy.deepcopy(model.config))


class _EmptyOnMeta(TorchFunctionMode):
    """Function mode that redirects `torch.empty`, which allocates parameters, to the meta device.

    Constructors compute buffers with other functions, so buffers keep their values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
