"""What decoder layers keep for the backward: the operators whose outputs are kept, and the bytes each policy keeps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from components.config.schema.parallelism import ActivationCheckpointing
from components.models.anatomy import own_class, shortened_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "higher_order::flex_attention",
    "higher_order::inductor_compiled_code",
)
"""Operators whose outputs are kept under `selective`: matmuls and attention. Everything else is cheap to recompute.

Compiled code inside a layer that is not compiled itself is flex attention, which transformers compiles; torch shows it
as an operator after `show_compiled_regions`.
"""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one decoder layer keeps of a micro-batch, and of a layer that is being recomputed all."""

    none: int
    selective: int
    full: int

    def of(self, policy: ActivationCheckpointing, layers: int, in_flight: int = 1) -> int:
        """Return the bytes of `layers` under a policy, each with so many micro-batches; one is being recomputed."""
        kept = {
            ActivationCheckpointing.none: self.none,
            ActivationCheckpointing.selective: self.selective,
            ActivationCheckpointing.full: self.full,
        }
        recomputed = 0 if policy == ActivationCheckpointing.none else self.none
        return kept[policy] * layers * in_flight + recomputed


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the forward and recompute contexts of a checkpoint that keeps the outputs of `KEPT` operators.

    torch's `create_selective_checkpoint_contexts` does not do, for two reasons. It keeps aliases, and the version
    counters that guard them are not shared by every alias (a linear layer returns an `_unsafe_view` of its matmul), so
    a layer that changes such an output in place is recomputed from the changed values. And it expects every operator of
    the recomputation in the forward, which FSDP's hooks around a nested unit do not satisfy.
    """
    outputs = _KeptOutputs()
    return _KeepOutputs(outputs), _ReuseOutputs(outputs)


def show_compiled_regions() -> None:
    """Let code compiled from now on appear as an operator to `keep_products`; for models that attend by flex attention.

    A setting of the process, because transformers compiles flex attention itself at its first call.
    """
    from torch._inductor import config

    if torch.__version__ >= "2.12":
        config.wrap_inductor_compiled_regions = True


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


def _is_kept(operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the output of this call is kept.

    Attention with dropout is not: skipping it in the recomputation would shift the random numbers of later dropouts.
    """
    schema = _schema(operator)
    if schema is None:
        return f"higher_order::{operator.name()}" in KEPT
    if schema.name not in KEPT or schema.is_mutable:
        return False
    return not next((value for name, value in _arguments(schema, args, kwargs) if name == "dropout_p"), 0.0)


def _schema(operator: Any) -> Any:
    """Return an operator's schema; None for a higher-order one."""
    return operator._schema if isinstance(operator, OpOverload) else None


def _queue_of(operator: Any, args: Any) -> Any:
    """Return the key under which the outputs of a call wait: one per operator, and per compiled region."""
    region = args[0] if args and not isinstance(args[0], torch.Tensor) else None
    return (operator, region) if isinstance(operator, HigherOrderOperator) else operator


def _arguments(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each argument of a call that was passed."""
    yield from zip((each.name for each in schema.arguments), args, strict=False)
    yield from kwargs.items()


def _written_tensors(operator: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call changes in place."""
    schema = _schema(operator)
    if schema is None or not schema.is_mutable:
        return
    written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    for name, value in _arguments(schema, args, kwargs):
        if name in written:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storages(tensor: torch.Tensor) -> list[int]:
    """Return the identity of the storage of a tensor, or of each inner tensor of a subclass such as DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()._cdata]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # DTensor names its mesh too
    return [storage for each in inner if isinstance(each, torch.Tensor) for storage in _storages(each)]


class _KeptTensor:
    """A tensor kept from the forward for the recomputation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached below autograd's in-place tracking, so that it shares the version counter without holding the graph.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = tensor.detach()
        self._version = self._tensor._version

    def copy(self) -> None:
        """Stop sharing memory with the forward."""
        self.check()
        self._tensor = self._tensor.clone()
        self._version = self._tensor._version

    def take(self) -> torch.Tensor:
        """Return the tensor, unchanged since the forward."""
        self.check()
        return self._tensor

    def check(self) -> None:
        """Raise RuntimeError if the tensor was changed in place by something that torch's dispatcher does not show."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "a kernel outside torch's dispatcher changed the output of a matmul or of attention in place, so "
                "parallelism.activation_checkpointing=selective would give wrong gradients; set it to full or none"
            )


class _KeptOutputs:
    """Outputs of one forward of a layer, queued in the order of the calls of each operator."""

    def __init__(self) -> None:
        self.of: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self.in_storage: defaultdict[int, list[_KeptTensor]] = defaultdict(list)

    def keep(self, queue: Any, output: Any) -> None:
        """Add the output of a call."""
        self.of[queue].append(tree_map_only(torch.Tensor, self._hold, output))

    def copy_storage(self, storage: int) -> None:
        """Copy what is kept in a storage that is about to change."""
        for kept in self.in_storage.pop(storage, ()):
            kept.copy()

    def _hold(self, tensor: torch.Tensor) -> _KeptTensor:
        kept = _KeptTensor(tensor)
        for storage in _storages(tensor):
            self.in_storage[storage].append(kept)
        return kept


class _KeepOutputs(TorchDispatchMode):
    """Keeps the outputs of `KEPT` operators in the forward, and copies one before it is changed in place."""

    supports_higher_order_operators = True

    def __init__(self, outputs: _KeptOutputs) -> None:
        super().__init__()
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside the layer stay compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._outputs.in_storage:
            for tensor in _written_tensors(func, args, kwargs):
                for storage in _storages(tensor):
                    self._outputs.copy_storage(storage)
        output = func(*args, **kwargs)
        if _is_kept(func, args, kwargs):
            self._outputs.keep(_queue_of(func, args), output)
        return output

    def __exit__(self, *exception: Any) -> None:
        """Copy what somebody outside the layer still holds, since its changes would not be seen."""
        super().__exit__(*exception)
        probe = torch.empty(0)  # counted beside its tensors: the reference that asking for the count takes
        asking = torch._C._storage_Use_Count(_storages(probe)[0]) - 1
        for storage, kept in list(self._outputs.in_storage.items()):
            if torch._C._storage_Use_Count(storage) > len(kept) + asking:
                self._outputs.copy_storage(storage)
        self._outputs.in_storage.clear()


class _ReuseOutputs(TorchDispatchMode):
    """Returns the kept outputs in the recomputation and runs all other operators."""

    supports_higher_order_operators = True

    def __init__(self, outputs: _KeptOutputs) -> None:
        super().__init__()
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside the layer stay compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        waiting = self._outputs.of[_queue_of(func, args)]
        if not waiting:
            raise RuntimeError(
                f"{func} ran more often in the recomputation of a layer than in its forward: the layer depends on "
                "state that changed in between, or its backward ran twice; set "
                "parallelism.activation_checkpointing=full"
            )
        return tree_map_only(_KeptTensor, _KeptTensor.take, waiting.popleft())


class _Products(TorchDispatchMode):
    """Counts the bytes of what `KEPT` return: as wide as hidden states, and others."""

    def __init__(self, count: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._count(leaf)
        return result


def _kept_by(model: PreTrainedModel, layers: int, rows: int, seq: int) -> list[int]:
    """Bytes that a model of so many layers keeps: (hidden-wide, others, hidden-wide products, other products)."""
    from components.models.attention import use_causal_sdpa  # transformers, which those who only recompute do not need

    config = shortened_config(model.config.get_text_config(), layers)
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
            twin.base_model(input_ids=tokens, use_cache=False)
    return kept
