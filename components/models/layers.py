"""Decoder layers of a model: finding them, activation checkpointing; trained parameters; and copies without memory.

Under pipeline parallelism, placeholders without parameters replace the layers of other stages. They keep their index in
the list and are left unchanged.

Tensor parallelism and FSDP replace a model's parameters and class. A copy of the model as transformers builds it still
provides the original names, global shapes, initialization rules and buffer values.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.training import TrainingConfig
from components.json_collectives import all_gather_json
from components.models.anatomy import Anatomy, ParameterCounts, kept_in_float32, read_anatomy, transformers_class
from components.models.lora import quantized_layers
from components.models.weights.shards import local_part
from components.models.weights.weight_sources import tied_names
from components.protocol.errors import raise_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NORM = re.compile("Norm(?!al)")
"""Matches the class name of a norm; not that of a NormalizedLinear."""
_SAVED_OPERATORS = (
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
"""Operators whose outputs are saved under `selective`: matmuls and attention. Everything else is cheap to recompute.

`inductor_compiled_code` is flex attention, which transformers compiles itself: it is the only compiled region inside an
uncompiled layer. torch dispatches such regions as one operator after `_wrap_compiled_regions`.
"""


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count the parameters of the unsharded model and of this rank, on any mesh. A collective: call it on all ranks.

    Ranks exchange parameter names, so that the counts include other pipeline stages.
    """
    packed = {f"{name}.weight": each.in_features * each.out_features for name, each in quantized_layers(model).items()}
    local = {
        name: (packed.get(name, parameter.numel()), parameter.requires_grad, name in packed)
        for name, parameter in model.named_parameters()
    }
    by_name = {name: counts for each in all_gather_json(local) for name, counts in each.items()}
    shards = [local_part(parameter) for parameter in model.parameters()]
    return ParameterCounts(
        total=sum(size for size, _, _ in by_name.values()),
        trainable=sum(size for size, trainable, _ in by_name.values() if trainable),
        packed=sum(size for size, _, is_packed in by_name.values() if is_packed),
        local_bytes=sum(shard.numel() * shard.element_size() for shard in shards),
    )


def select_trained(model: nn.Module, training: TrainingConfig, groups: Sequence[dict[str, Any]] = ()) -> None:
    """Freeze what training.trainable and training.freeze leave out, in place.

    Call it before the model is sharded, when every rank has all names. A tied parameter has its first name only.

    Args:
        groups: optimizer.groups, each of which must match a trained parameter that no earlier one matches.

    Raises ConfigError for a regular expression that matches no parameter, or if nothing is left to train.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = _found(trained, training.trainable or [""])
    problems = _unmatched(model, "training.trainable", training.trainable, trained)
    problems += _unmatched(model, "training.freeze", training.freeze, kept)
    frozen = set(_found(kept, training.freeze))
    kept = [name for name in kept if name not in frozen]
    if trained and not kept and not problems:
        problems.append(
            f"training.freeze={training.freeze}: freezes all that training.trainable={training.trainable} selects, so "
            "that nothing is trained; freeze fewer"
        )
    rest = kept
    for number, match in enumerate(str(group["match"]) for group in groups):
        problems += _unmatched(model, f"optimizer.groups[{number}].match", [match], rest) if not problems else []
        rest = [name for name in rest if not re.search(match, name)]
    raise_all(problems)
    for name in trained.keys() - set(kept):
        trained[name].requires_grad_(False)


def _found(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _unmatched(model: nn.Module, key: str, patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a problem for each regular expression that is found in none of the names."""
    problems = []
    for pattern in patterns:
        if _found(names, [pattern]):
            continue
        others = [f"{name} is tied to {first}, whose name counts" for name, first in tied_names(model).items()]
        others += [f"{name} is frozen, or matched before" for name, _ in model.named_parameters()]
        reason = next(iter(_found(others, [pattern])), "no trained parameter has such a name")
        kinds = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names)
        problems.append(f"{key}={pattern}: {reason}; match some of {', '.join(kinds)}")
    return problems


def decoder_layers(model: nn.Module, anatomy: Anatomy | None = None) -> list[nn.Module]:
    """Return the decoder layers in order, including placeholders of other pipeline stages.

    Args:
        anatomy: Structure of the model, read before it was parallelized; None: read it now.

    Raises:
        NotImplementedError: The model has no ModuleList of decoder layers.
    """
    layers = list((anatomy or read_anatomy(model)).decoder_layers(model).values())
    if not layers:
        raise NotImplementedError(f"{type(model).__name__} has no list of decoder layers")
    return layers


def checkpoint_activations(
    model: PreTrainedModel, policy: ActivationCheckpointing, anatomy: Anatomy | None = None
) -> None:
    """Apply activation checkpointing to decoder layers in place: save less in the forward, recompute in the backward.

    Policies: full saves only each layer's input (a third more FLOPs); alternate does so for every other layer of the
    model; selective also saves the outputs of matmuls and attention, so that only cheap operators are recomputed.
    Parameter names do not change, because only forwards are replaced. The recomputation runs inside FSDP's hooks, where
    the layer's parameters are unsharded anyway.

    Raises ValueError for `auto`, which must be resolved to another policy first.
    """
    if policy == ActivationCheckpointing.auto:
        raise ValueError("parallelism.activation_checkpointing=auto: resolve it with choose_recompute_policy first")
    if policy == ActivationCheckpointing.none:
        return
    if policy == ActivationCheckpointing.selective and model.config._attn_implementation == "flex_attention":
        _wrap_compiled_regions()
    options: dict[str, Any] = {"context_fn": _selective_contexts} if policy == ActivationCheckpointing.selective else {}
    layers = decoder_layers(model, anatomy)[:: 1 + (policy == ActivationCheckpointing.alternate)]
    for layer in filter(has_parameters, layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def vector_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are vectors or stacks of vectors: biases, weights of norms, and all of one dim.

    Stacked ones have as many dims as matrices: the biases of all experts, the norms of all heads.
    """
    return {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() < 2 or name.endswith("bias") or _NORM.search(type(module).__name__)
    }


def has_parameters(layer: nn.Module) -> bool:
    """Return whether a layer is real; placeholders of other pipeline stages have no parameters."""
    return any(True for _ in layer.parameters())


def meta_copy(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the copy on the meta device, with the dtypes of a model loaded in `dtype` (None: the model's dtype)."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        copied: PreTrainedModel = transformers_class(model)._from_config(config, dtype=dtype or config.dtype)
    return keep_float32(copied)


def keep_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Set the tensors to float32, in place, that transformers keeps in float32 when it loads weights in 16 bits.

    They are listed by the class, such as biases that balance experts, which 16 bits would round to another choice of
    experts. Constructors create them in the dtype of the model.
    """
    if (kept := kept_in_float32(model, model.dtype)) is None:
        return model
    for name, parameter in model.named_parameters():
        if kept.search(name):
            parameter.data = parameter.data.float()
    for name, buffer in list(model.named_buffers()):
        if kept.search(name) and buffer.is_floating_point():
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._buffers[attribute] = buffer.float()
    return model


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


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the forward and recompute contexts for a `checkpoint` that saves the outputs of `_SAVED_OPERATORS`.

    torch's `create_selective_checkpoint_contexts` is not used, for two reasons. It saves aliases, whose version
    counters are not always shared with the original (a linear layer returns an `_unsafe_view` of its matmul), so a
    layer that modifies such an output in place would be recomputed from the modified values. It also requires that the
    forward ran every operator of the recomputation, which FSDP's hooks around a nested unit violate.
    """
    outputs = _SavedOutputs()
    return _SaveOutputs(outputs), _ReuseOutputs(outputs)


def _wrap_compiled_regions() -> None:
    """Make code that is compiled from now on visible to `_selective_contexts` as one operator; for flex attention.

    This is a process-wide setting, because transformers compiles flex attention itself at its first call.
    """
    from torch._inductor import config

    config.wrap_inductor_compiled_regions = True


def _is_saved(operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the output of this call is saved.

    Attention with dropout is not saved: skipping it in the recomputation would shift the random numbers of later
    dropouts.
    """
    schema = _schema(operator)
    if schema is None:
        return f"higher_order::{operator.name()}" in _SAVED_OPERATORS
    if schema.name not in _SAVED_OPERATORS or schema.is_mutable:
        return False
    return not next((value for name, value in _arguments(schema, args, kwargs) if name == "dropout_p"), 0.0)


def _schema(operator: Any) -> Any:
    """Return an operator's schema; None for a higher-order operator."""
    return operator._schema if isinstance(operator, OpOverload) else None


def _queue_of(operator: Any, args: Any) -> Any:
    """Return the key of the queue for a call's outputs: one per operator, and one per compiled region."""
    region = args[0] if args and not isinstance(args[0], torch.Tensor) else None
    return (operator, region) if isinstance(operator, HigherOrderOperator) else operator


def _arguments(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each argument that was passed in a call."""
    yield from zip((argument.name for argument in schema.arguments), args, strict=False)
    yield from kwargs.items()


def _written_tensors(operator: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call modifies in place."""
    schema = _schema(operator)
    if schema is None or not schema.is_mutable:
        return
    written = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    for name, value in _arguments(schema, args, kwargs):
        if name in written:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storages(tensor: torch.Tensor) -> list[int]:
    """Return the address of the storage of a tensor, or of each inner tensor of a subclass such as DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()._cdata]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # DTensor also lists its mesh
    return [storage for each in inner if isinstance(each, torch.Tensor) for storage in _storages(each)]


class _SavedTensor:
    """A tensor saved in the forward for the recomputation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detach below autograd's in-place tracking, to share the version counter without holding the graph.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = tensor.detach()
        self._version = self._tensor._version

    def copy(self) -> None:
        """Replace the tensor with a copy that does not share memory with the forward."""
        self.check()
        self._tensor = self._tensor.clone()
        self._version = self._tensor._version

    def take(self) -> torch.Tensor:
        """Return the tensor, which is unchanged since the forward."""
        self.check()
        return self._tensor

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place by an operation that torch did not dispatch."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "a kernel outside torch's dispatcher modified the output of a matmul or of attention in place, so "
                "parallelism.activation_checkpointing=selective would give wrong gradients; set it to full or none"
            )


class _SavedOutputs:
    """Outputs of one forward of a layer, in one queue per operator, in call order."""

    def __init__(self) -> None:
        self.queues: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self.by_storage: defaultdict[int, list[_SavedTensor]] = defaultdict(list)

    def save(self, queue: Any, output: Any) -> None:
        """Append the output of a call to its queue."""
        self.queues[queue].append(tree_map_only(torch.Tensor, self._save_tensor, output))

    def copy_storage(self, storage: int) -> None:
        """Copy the saved tensors of a storage that is about to be modified."""
        for saved in self.by_storage.pop(storage, ()):
            saved.copy()

    def _save_tensor(self, tensor: torch.Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor)
        for storage in _storages(tensor):
            self.by_storage[storage].append(saved)
        return saved


class _OutputsMode(TorchDispatchMode):
    """Base of the dispatch modes around a layer's forward and its recomputation."""

    supports_higher_order_operators = True

    def __init__(self, outputs: _SavedOutputs) -> None:
        super().__init__()
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled functions inside the layer compiled."""
        return True


class _SaveOutputs(_OutputsMode):
    """Dispatch mode of the forward: saves outputs of `_SAVED_OPERATORS`, and copies one before it is modified."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._outputs.by_storage:
            for tensor in _written_tensors(func, args, kwargs):
                for storage in _storages(tensor):
                    self._outputs.copy_storage(storage)
        output = func(*args, **kwargs)
        if _is_saved(func, args, kwargs):
            self._outputs.save(_queue_of(func, args), output)
        return output

    def __exit__(self, *exception: Any) -> None:
        """Copy saved tensors whose storage is still referenced outside the layer: this mode cannot see later writes."""
        super().__exit__(*exception)
        probe = torch.empty(0)  # an unshared storage, to measure the references that the use count itself adds
        overhead = torch._C._storage_Use_Count(_storages(probe)[0]) - 1
        for storage, saved in list(self._outputs.by_storage.items()):
            if torch._C._storage_Use_Count(storage) > len(saved) + overhead:
                self._outputs.copy_storage(storage)
        self._outputs.by_storage.clear()


class _ReuseOutputs(_OutputsMode):
    """Dispatch mode of the recomputation: returns saved outputs and runs all other operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_saved(func, args, kwargs):
            return func(*args, **kwargs)
        queue = self._outputs.queues[_queue_of(func, args)]
        if not queue:
            raise RuntimeError(
                f"{func} ran more often in the recomputation of a layer than in its forward: the layer depends on "
                "state that changed in between, or its backward ran twice; set "
                "parallelism.activation_checkpointing=full"
            )
        return tree_map_only(_SavedTensor, _SavedTensor.take, queue.popleft())
