"""What decoder layers keep for the backward: which results are worth keeping, and how many bytes each policy keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from components.config.schema.parallelism import ActivationCheckpointing
from components.models.twin import own_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = (
    "mm",
    "addmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operators of aten that are dear to recompute: products with matrices, and attention; all else is cheap."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one decoder layer keeps of a micro-batch, and of a layer that is being recomputed all."""

    none: int
    selective: int
    full: int

    def of(self, policy: ActivationCheckpointing, layers: int, in_flight: int = 1) -> int:
        """Return the bytes of `layers` under a policy, each with so many micro-batches; one is being recomputed."""
        recomputed = 0 if policy == ActivationCheckpointing.none else self.none
        return getattr(self, str(policy)) * layers * in_flight + recomputed


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpoint that keeps results of `KEPT` and recomputes all others."""
    return create_selective_checkpoint_contexts(_policy)


def layer_bytes(
    model: PreTrainedModel, rows: int, seq: int, dtype: torch.dtype, tp: int = 1, sequence_parallel: bool = False
) -> LayerBytes:
    """Measure what a layer keeps of a micro-batch of (rows, seq), without memory: on fake tensors.

    They are of bfloat16, whatever `dtype`, because fused experts have no others; their bytes are scaled. tp divides all
    that is not as wide as the hidden states, sequence parallel that too. Whatever the model raises when it is run on
    fake tensors is raised.
    """
    one, two = (_kept_by(model, layers, rows, seq) for layers in (1, 2))
    scale = dtype.itemsize // 2
    hidden, inner, products_hidden, products = (scale * (two[kind] - one[kind]) for kind in range(4))
    share = tp if sequence_parallel else 1
    entering = rows * seq * model.config.get_text_config().hidden_size * dtype.itemsize // share
    return LayerBytes(
        none=hidden // share + inner // tp,
        selective=entering + products_hidden // share + products // tp,
        full=entering,
    )


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any) -> bool:
    namespace, _, name = getattr(operator, "_schema", operator).name.partition("::")
    return namespace == "aten" and name in KEPT


class _Products(TorchDispatchMode):
    """Counts the bytes of what `KEPT` return: as wide as hidden states, and others."""

    def __init__(self, count: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._count(leaf)
        return result


def _kept_by(model: PreTrainedModel, layers: int, rows: int, seq: int) -> list[int]:
    """Bytes that a model of so many layers keeps: (hidden-wide, others, hidden-wide products, other products)."""
    from components.models.attention import use_causal_sdpa  # transformers, which those who only recompute do not need

    config: Any = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    kept = [0, 0, 0, 0]
    seen: dict[int, Any] = {}

    def count(tensor: torch.Tensor, start: int) -> None:
        size = tensor.untyped_storage().nbytes()
        kept[start + (tensor.shape[-1:] != (config.hidden_size,))] += size

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage  # held, so that no other gets its address
            count(tensor, 0)
        return tensor

    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        twin: Any = own_class(model)._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        use_causal_sdpa(twin)
        seen |= {each.untyped_storage()._cdata: each.untyped_storage() for each in twin.parameters()}
        tokens = torch.zeros(rows, seq, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Products(partial(count, start=2)):
            getattr(twin, twin.base_model_prefix)(input_ids=tokens, use_cache=False)
    return kept
