"""Patch of a causal LM that lets it take targets and return the sum of their losses instead of logits.

The model's original forward runs up to its LM head, where a placeholder captures the hidden states; the head then
computes the loss from them. Both happen within the model's forward, and the head is called as a module, so that the
hooks of FSDP, DDP and tp on model and head work as usual. Without targets the forward is unchanged, for generation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from components.batch import HEAD_KEYWORDS
from components.config.compute_rules import chunk_logits
from components.config.schema.data import IGNORED
from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.parallelism import SPLIT_BACKWARD, ParallelismConfig
from components.config.schema.training import EvaluationConfig, TrainingConfig
from components.distributed.mesh import Mesh
from components.distributed.pipeline_stages import Stages, shallow_copy
from components.distributed.tensor_parallel import as_replicated
from components.protocol.errors import ConfigError
from components.torch_kernels import active_autocast_dtype
from components.training.objectives import PLAIN, CrossEntropy, HeadOutput, TokenLoss, Vocabulary
from components.training.objectives.chunked_loss import (
    Head,
    Targets,
    chunk_tokens,
    linear_token_loss,
)

_LogitsTransform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossHead:
    """Method by which a run computes its loss from hidden states."""

    method: LossMethod
    """logits, chunked or liger."""
    why: str
    """Details or the reason, for the banner."""

    @property
    def takes_targets(self) -> bool:
        """Whether the model takes targets and returns the sum of their losses instead of logits."""
        return self.method != LossMethod.logits

    head: nn.Module | None = None
    """The LM head if it takes targets; None on pipeline ranks without it."""
    spec: Head = field(default_factory=Head)
    """Properties of that head."""

    def __str__(self) -> str:
        return f"loss: {self.method}, {self.why}"


class _UnsupportedError(Exception):
    """Reason why a model's loss cannot be computed without materializing all logits."""


def attach_loss_head(
    model: nn.Module,
    cfg: ModelConfig,
    sizes: TrainingConfig | EvaluationConfig,
    parallelism: ParallelismConfig,
    mesh: Mesh | None,
    stages: Stages | None,
    device: torch.device,
) -> LossHead:
    """Patch a causal LM, or the last of its pipeline stages, to take `targets` if the loss method needs it.

    With cfg.compile=true the chunked loss is compiled, unless its vocabulary is sharded or its objective is not the
    cross-entropy.
    Call it on all ranks, after the model is parallelized. `auto` resolves to chunked if the model supports it and the
    logits of a micro-batch exceed one chunk, else to logits.

    Raises ConfigError if `chunked` or `liger` is configured and the model does not support it.
    """
    method = cfg.loss
    if method == LossMethod.logits:
        return LossHead(method, "set by model.loss")
    last = model if stages is None else next((each.module for each in stages.own if each.index == stages.last), None)
    name = _head_name(model)
    head = None if last is None else last._modules.get(name)
    try:
        if head is not None:
            _check_head(head)
        transform = _logits_transform(model, name)
        if method == LossMethod.liger:
            _check_liger(device, transform)
    except _UnsupportedError as reason:
        if method == LossMethod.auto:
            return LossHead(LossMethod.logits, f"{type(model).__name__}: {reason}")
        raise ConfigError(f"model.loss={method}: {type(model).__name__}: {reason}; set model.loss=logits") from reason
    vocabulary, logits = vocabulary_of(model), _chunk_logits(device, mesh)
    tokens = sizes.micro_batch_size * sizes.seq_len // (mesh.size("cp") if mesh else 1)
    # Of the whole vocabulary: without chunks, every tp rank holds all logits.
    if method == LossMethod.auto and tokens <= chunk_tokens(vocabulary, device, logits):
        return LossHead(LossMethod.logits, f"{tokens:,} tokens x a vocabulary of {vocabulary:,} fit into one chunk")
    chunk = chunk_tokens(-(-vocabulary // (mesh.size("tp") if mesh else 1)), device, logits)
    method = LossMethod.chunked if method == LossMethod.auto else method
    split = stages is not None and parallelism.pp_schedule in SPLIT_BACKWARD
    compiled = cfg.compile == "true"
    spec = Head(logits_transform=transform, backward_twice=split, chunk_logits=logits, compiled=compiled)
    if last is not None and head is not None:
        _TakesTargets(last, name, head, method, spec)
    transformed = "" if transform is None else ", with the model's transform of its logits"
    details = "fused" if method == LossMethod.liger else f"logits of at most {chunk:,} tokens at a time"
    return LossHead(method, f"{details}{transformed}", head, spec)


class _TakesTargets:
    """Patched forwards of a model and its head, which take targets too.

    The instances' `forward` attributes are replaced, not the modules, so that parameter names and hooks stay.
    """

    def __init__(self, model: nn.Module, name: str, head: nn.Module, method: LossMethod, spec: Head) -> None:
        self._model, self._name, self._head = model, name, head
        self._method, self._spec = method, spec
        self._model_forward, self._head_forward = model.forward, head.forward
        model.forward, head.forward = self.forward, self.head_forward

    def forward(self, *args: Any, targets: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Return the model's output; with `targets` (batch, seq) the sum of their losses, a scalar.

        With targets, the keyword arguments of `head_forward` are accepted too.
        """
        if targets is None:
            return self._model_forward(*args, **kwargs)
        head_kwargs = {name: kwargs.pop(name) for name in HEAD_KEYWORDS if name in kwargs}
        captured = _CaptureHidden()
        self._model._modules[self._name] = captured
        try:
            self._model_forward(*args, **kwargs)
        finally:
            self._model._modules[self._name] = self._head
        if captured.hidden is None:
            raise RuntimeError(f"{type(self._model).__name__} did not call head {self._name}; set model.loss=logits")
        loss = self._head(captured.hidden, targets=targets, **head_kwargs)
        # FSDP, and pipeline schedules that detach the loss in place, cannot handle a view.
        return loss.clone() if loss._is_view() else loss

    def head_forward(
        self,
        hidden: torch.Tensor,
        *args: Any,
        targets: torch.Tensor | None = None,
        target_count: int | None = None,
        token_loss: TokenLoss = PLAIN.token_loss,
        token_weight_bits: torch.Tensor | None = None,
        token_values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        output: HeadOutput = HeadOutput.loss_sum,
        **kwargs: Any,
    ) -> Any:
        """Return the logits of `hidden` (batch, seq, hidden); with `targets` (batch, seq) the given `output`.

        Args:
            target_count: Host-side upper bound on the number of targets that are not ignored; None: unknown.
            token_loss: The loss of a token.
            token_weight_bits: Factors of the losses, (batch, seq) float64 viewed as int64: see `Batch.head_inputs`.
            token_values: `Batch.token_values` as the integers of `components.batch.bits_of`, each (batch, seq, ...).
        """
        if targets is None:
            return self._head_forward(hidden, *args, **kwargs)
        weight, bias, spec, mesh = local_head(self._head, self._spec)
        if mesh is not None and spec.vocabulary.group is not None:
            hidden = as_replicated(hidden, mesh)
        if output == HeadOutput.hidden_states:
            return hidden
        per_token = output == HeadOutput.token_losses
        rows: Any = hidden
        returns_dtensor = isinstance(hidden, DTensor)  # tp's hooks of the head convert them, of a replicated head none
        if isinstance(hidden, DTensor):
            is_sharded = spec.vocabulary.group is not None
            rows = hidden.to_local(grad_placements=[Partial() if is_sharded else Replicate()])
        rows, ids = rows.flatten(0, -2), targets.flatten()  # (tokens, hidden), (tokens,)
        weights = None if token_weight_bits is None else token_weight_bits.view(torch.float64).flatten()
        if self._method == LossMethod.liger:
            loss = _liger(rows, weight, bias, ids, token_loss, weights, per_token)
        else:
            values = {key: value.flatten(0, 1) for key, value in token_values.items()}  # (tokens, ...)
            flat = Targets(ids, target_count, weights, values)
            loss = linear_token_loss(rows, weight, bias, flat, spec, token_loss, per_token=per_token)
        if per_token:
            loss = loss.view(targets.shape)
        # tp's output hook of the head expects a DTensor if its input hook passed one.
        return DTensor.from_local(loss, mesh, [Replicate()], run_check=False) if returns_dtensor else loss


def _chunk_logits(device: torch.device, mesh: Mesh | None) -> int | None:
    """Return the most logits of a chunk for the memory of the GPU, the least of the tp ranks; None on other devices.

    tp ranks that share the vocabulary must divide their tokens alike, as each chunk has collectives.
    """
    if device.type != "cuda":
        return None
    limit = torch.tensor(chunk_logits(torch.cuda.get_device_properties(device).total_memory))
    if mesh is not None and mesh.size("tp") > 1:
        dist.all_reduce(limit, dist.ReduceOp.MIN, group=mesh["tp"].get_group())
    return int(limit)


def local_head(head: Any, spec: Head) -> tuple[torch.Tensor, torch.Tensor | None, Head, DeviceMesh | None]:
    """Return this rank's weight and bias of an LM head, its properties with the vocabulary's sharding, and the tp mesh.

    The weight is (this rank's vocabulary, hidden); the mesh is None if the weight is not a DTensor.

    Raises RuntimeError if FSDP has not unsharded the head.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, spec, None
    mesh, (placement,) = weight.device_mesh, weight.placements
    if mesh.mesh_dim_names != ("tp",):
        raise RuntimeError(f"the weight of the LM head is still sharded over {mesh}: FSDP must gather it first")
    if placement.is_shard():
        largest = -(-weight.shape[0] // mesh.size())  # the last shards may be smaller
        first = mesh.get_local_rank() * largest
        spec = replace(spec, vocabulary=Vocabulary(mesh.get_group(), first, largest, weight.shape[0]))
    return weight.to_local(), None if bias is None else bias.to_local(), spec, mesh


class _CaptureHidden(nn.Module):
    """Placeholder for the LM head that captures its input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Capture (batch, seq, hidden); return logits of an empty vocabulary."""
        self.hidden = hidden
        return hidden[..., :0].detach()


class _Constant(nn.Module):
    """Placeholder for a module that returns a fixed value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value, whatever the arguments."""
        return self.value


class _BaseModelOutput:
    """Output of a base model with hidden states only; every other attribute is None, every other element empty."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


def _logits_transform(model: Any, name: str) -> _LogitsTransform | None:
    """Return the transform that the model's forward applies to the logits of its head, or None for the identity.

    transformers does not expose softcapping and scales of logits: they are statements in each model's forward. The
    forward of the model's class therefore runs on a copy whose base model and head are placeholders that return given
    logits.

    Raises _UnsupportedError if the transform cannot be applied to a subset of the tokens and of the vocabulary.
    """
    placeholder = shallow_copy(model)
    placeholder._modules = dict.fromkeys(model._modules)
    class_forward = type(placeholder).forward

    def transform(logits: torch.Tensor) -> torch.Tensor:  # (tokens, vocabulary) -> the same shape
        hidden = logits[None, :, :1]  # as long as the logits, which Gemma 4's forward compares
        placeholder._modules[model.base_model_prefix] = _Constant(_BaseModelOutput(hidden))
        placeholder._modules[name] = _Constant(logits[None])
        return class_forward(placeholder, input_ids=None, inputs_embeds=hidden, use_cache=False).logits[0]

    logits = 4 * torch.randn(3, vocabulary_of(model), generator=torch.Generator().manual_seed(0))
    half = logits.shape[1] // 2
    try:
        with torch.no_grad():
            transformed = transform(logits)
            if torch.equal(transformed, logits):
                return None
            parts = torch.cat([transform(logits[1:, :half]), transform(logits[1:, half:])], dim=1)
            is_elementwise = parts.shape == transformed[1:].shape and torch.equal(parts, transformed[1:])
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise _UnsupportedError(f"the code after its LM head cannot be run separately ({error})") from error
    if not is_elementwise:
        raise _UnsupportedError("its transform of the logits is not elementwise, so it needs all of them at once")
    return transform


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, child in model._modules.items() if child is head and head is not None), "")


def _check_head(head: nn.Module) -> None:
    names = {name for name, _ in head.named_parameters()}
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or names - {"weight", "bias"}:
        raise _UnsupportedError(f"its LM head is a {type(head).__name__}, not a plain linear layer")
    weight = head.weight
    axes = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    placement = weight.placements[-1] if isinstance(weight, DTensor) and axes[-1:] == ("tp",) else Replicate()
    if not placement.is_replicate() and not placement.is_shard(0):
        raise _UnsupportedError(f"the tp plan places the weight of its LM head as {placement}, not vocabulary-parallel")


def vocabulary_of(model: Any) -> int:
    """Return the vocabulary size of a model."""
    return model.config.get_text_config().vocab_size


def _check_liger(device: torch.device, transform: _LogitsTransform | None) -> None:
    if device.type != "cuda":
        raise _UnsupportedError(f"liger-kernel runs on GPUs only, and this device is {device.type}")
    if transform is not None:
        raise _UnsupportedError("it transforms its logits after the LM head, which liger-kernel does not support")
    if importlib.util.find_spec("liger_kernel") is None:
        raise _UnsupportedError("liger-kernel is not installed (pip install 'meshbook[liger]')")


def _liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    token_loss: TokenLoss,
    weights: torch.Tensor | None,
    per_token: bool,
) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if not isinstance(token_loss, CrossEntropy) or weights is not None or per_token:
        raise ConfigError(
            "model.loss=liger: its kernel computes the sum of cross-entropies only, but this objective weights token "
            "losses or needs each of them; set model.loss=chunked"
        )
    dtype = active_autocast_dtype(hidden) or hidden.dtype  # a trained head over frozen weights is wider
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    # Sums over chunks are accumulated in float32, as in linear_token_loss. The kernel's wrapper counts targets on the
    # host, which waits for the device.
    return liger_fused_linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        ignore_index=IGNORED,
        lse_square_scale=token_loss.z_loss,
        label_smoothing=token_loss.label_smoothing,
        reduction="sum",
        accum_dtype=torch.float32,
    ).float()
