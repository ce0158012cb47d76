"""Let a model take targets and return the sum of their losses instead of logits.

The model's own forward runs up to its LM head, where a placeholder captures the hidden states; the head then computes
the loss from them. Both happen within the model's forward, and the head is called as a module, so that the hooks of
FSDP, DDP and tp on either work as they do for logits. Without targets the forward is unchanged: generation gets logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from components.batch import HEAD_KEYWORDS
from components.config.errors import ConfigError
from components.config.schema.data import IGNORED
from components.config.schema.model import LossMethod
from components.config.schema.parallelism import SPLIT_BACKWARD, ParallelismConfig
from components.config.schema.training import EvaluationConfig, TrainingConfig
from components.distributed.mesh import Mesh
from components.distributed.pipeline.stages import Stages, shallow_copy
from components.distributed.tensor.tensor_parallel import as_replicated
from components.training.objectives import PLAIN, CrossEntropy, TokenLoss, Vocabulary
from components.training.objectives.chunked_loss import Head, Targets, autocast_dtype, chunk_tokens, linear_token_loss

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossHead:
    """How a run computes its loss from hidden states, and why so."""

    method: LossMethod
    """logits, chunked or liger."""
    why: str
    """For the banner."""

    @property
    def takes_targets(self) -> bool:
        """Whether the model takes targets and returns the sum of their losses; else it returns logits."""
        return self.method != LossMethod.logits

    def __str__(self) -> str:
        return f"loss: {self.method}, {self.why}"


class _NotPossibleError(Exception):
    """Why a model's logits must be made."""


def attach_loss_head(
    model: nn.Module,
    asked: LossMethod,
    sizes: TrainingConfig | EvaluationConfig,
    parallelism: ParallelismConfig,
    mesh: Mesh | None,
    stages: Stages | None,
    device: torch.device,
) -> LossHead:
    """Let a causal LM, or the last of its pipeline stages, take `targets` as `model.loss` says.

    Call it on all ranks, after the model was laid over the mesh. `auto` is chunked wherever that is possible and the
    logits of a micro-batch are more than a chunk.

    Raises ConfigError where `chunked` or `liger` was asked for and cannot be.
    """
    if asked == LossMethod.logits:
        return LossHead(asked, "as model.loss says")
    last = model if stages is None else next((each.module for each in stages.own if each.index == stages.last), None)
    name = _head_name(model)
    head = None if last is None else last._modules.get(name)
    try:
        if head is not None:
            _check_head(head)
        change = _change_of_logits(model, name)
        if asked == LossMethod.liger:
            _check_liger(device, change)
    except _NotPossibleError as reason:
        if asked == LossMethod.auto:
            return LossHead(LossMethod.logits, f"{type(model).__name__}: {reason}")
        raise ConfigError(f"model.loss={asked}: {type(model).__name__}: {reason}; set model.loss=logits") from reason
    words = -(-_vocabulary(model) // (mesh.size("tp") if mesh else 1))
    tokens, chunk = (
        sizes.micro_batch_size * sizes.seq_len // (mesh.size("cp") if mesh else 1),
        chunk_tokens(words, device),
    )
    if asked == LossMethod.auto and tokens <= chunk:
        return LossHead(LossMethod.logits, f"those of {tokens:,} tokens x {words:,} words are no more than a chunk")
    method = LossMethod.chunked if asked == LossMethod.auto else asked
    if last is not None and head is not None:
        split = stages is not None and parallelism.pp_schedule in SPLIT_BACKWARD
        _TakesTargets(last, name, head, method, Head(after=change, backward_twice=split))
    kept = "" if change is None else ", with what the model does to its logits"
    how = "fused" if method == LossMethod.liger else f"logits of at most {chunk:,} tokens at a time"
    return LossHead(method, f"{how}{kept}")


class _TakesTargets:
    """Replaces the forwards of a model and of its head by ones that take targets too."""

    def __init__(self, model: nn.Module, name: str, head: nn.Module, method: LossMethod, how: Head) -> None:
        self._model, self._name, self._head = model, name, head
        self._method, self._how = method, how
        self._model_forward, self._head_forward = model.forward, head.forward
        model.forward, head.forward = self.forward, self.head_forward

    def forward(self, *args: Any, targets: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Return what the model returns; with `targets` (batch, seq) the sum of their losses, a scalar.

        The keywords of `head_forward` may come with the targets.
        """
        if targets is None:
            return self._model_forward(*args, **kwargs)
        of_head = {name: kwargs.pop(name) for name in HEAD_KEYWORDS if name in kwargs}
        captured = _CaptureHidden()
        self._model._modules[self._name] = captured
        try:
            self._model_forward(*args, **kwargs)
        finally:
            self._model._modules[self._name] = self._head
        if captured.hidden is None:
            raise RuntimeError(f"{type(self._model).__name__} did not call its head, {self._name}")
        loss = self._head(captured.hidden, targets=targets, **of_head)
        return loss.clone() if loss._is_view() else loss  # FSDP, and schedules that detach it in place, want no view

    def head_forward(
        self,
        hidden: torch.Tensor,
        *args: Any,
        targets: torch.Tensor | None = None,
        target_count: int | None = None,
        token_loss: TokenLoss = PLAIN.token_loss,
        token_weight_bits: torch.Tensor | None = None,
        per_token: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the logits of `hidden` (batch, seq, hidden); with `targets` (batch, seq) the sum of their losses.

        Args:
            target_count: Host-side upper bound on the number of targets that are not ignored.
            token_loss: The loss of a token.
            token_weight_bits: Factors of the losses, (batch, seq) float64 viewed as int64: see `Batch.head_inputs`.
            per_token: Return the losses (batch, seq) instead of their sum.
        """
        if targets is None:
            return self._head_forward(hidden, *args, **kwargs)
        weight: Any = self._head.weight
        bias: Any = self._head.bias
        how, mesh = self._how, None
        if isinstance(weight, DTensor):
            mesh, (placement,) = weight.device_mesh, weight.placements
            if mesh.mesh_dim_names != ("tp",):
                raise RuntimeError(f"the head is used before its weight was gathered: it lies on {mesh}")
            if placement.is_shard():
                largest = -(-weight.shape[0] // mesh.size())  # the last shards may be smaller
                first = mesh.get_local_rank() * largest
                how = replace(how, vocabulary=Vocabulary(mesh.get_group(), first, largest, weight.shape[0]))
                hidden = as_replicated(hidden, mesh)
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        rows: Any = hidden
        if isinstance(hidden, DTensor):
            is_sharded = how.vocabulary.group is not None
            rows = hidden.to_local(grad_placements=[Partial() if is_sharded else Replicate()])
        rows, answers = rows.flatten(0, -2), targets.flatten()  # (tokens, hidden), (tokens,)
        weights = None if token_weight_bits is None else token_weight_bits.view(torch.float64).flatten()
        if self._method == LossMethod.liger:
            loss = _liger(rows, weight, bias, answers, token_loss, weights, per_token)
        else:
            known = Targets(answers, target_count, weights)
            loss = linear_token_loss(rows, weight, bias, known, how, token_loss, per_token=per_token)
        if per_token:
            loss = loss.view(targets.shape)
        # tp's own hook at the head's border takes what it gave: a DTensor for a DTensor.
        return (
            loss if mesh is None or rows is hidden else DTensor.from_local(loss, mesh, [Replicate()], run_check=False)
        )


class _CaptureHidden(nn.Module):
    """Placeholder for the LM head that captures its input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Capture (batch, seq, hidden); return logits of an empty vocabulary."""
        self.hidden = hidden
        return hidden[..., :0].detach()


class _Gives(nn.Module):
    """Stands for a module and gives what it was told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever it is given."""
        return self.value


class _InnerOutput:
    """What an inner model returns, as far as the code after it looks: hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


def _change_of_logits(model: Any, name: str) -> Change | None:
    """What the model's own forward does to the logits that its head gave, or None where it leaves them alone.

    Raises _NotPossibleError where it cannot be applied to some tokens and some words at a time.
    """
    stand_in = shallow_copy(model)
    stand_in._modules = dict.fromkeys(model._modules)
    own = type(stand_in).forward

    def change(logits: torch.Tensor) -> torch.Tensor:  # (tokens, words) -> the same
        stand_in._modules[model.base_model_prefix] = _Gives(_InnerOutput(logits[None, :, :1]))
        stand_in._modules[name] = _Gives(logits[None])
        return own(stand_in, input_ids=None, use_cache=False).logits[0]

    logits = 4 * torch.randn(3, _vocabulary(model), generator=torch.Generator().manual_seed(0))
    half = logits.shape[1] // 2
    try:
        with torch.no_grad():
            changed = change(logits)
            if torch.equal(changed, logits):
                return None
            parts = torch.cat([change(logits[1:, :half]), change(logits[1:, half:])], dim=1)
            alone = parts.shape == changed[1:].shape and torch.equal(parts, changed[1:])
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise _NotPossibleError(f"the code after its head cannot be run by itself ({error})") from error
    if not alone:
        raise _NotPossibleError("it changes its logits in a way that needs all of them at once")
    return change


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, child in model._modules.items() if child is head and head is not None), "")


def _check_head(head: nn.Module) -> None:
    own = {name for name, _ in head.named_parameters()}
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or own - {"weight", "bias"}:
        raise _NotPossibleError(f"its head is a {type(head).__name__}, not a plain linear layer")
    weight = head.weight
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    place = weight.placements[-1] if isinstance(weight, DTensor) and names[-1:] == ("tp",) else Replicate()
    if not place.is_replicate() and not place.is_shard(0):
        raise _NotPossibleError(f"tp lays its head out as {place}, not by words")


def _vocabulary(model: Any) -> int:
    return model.config.get_text_config().vocab_size


def _check_liger(device: torch.device, change: Change | None) -> None:
    if device.type != "cuda":
        raise _NotPossibleError(f"liger-kernel computes on GPUs only, and this device is {device.type}")
    if change is not None:
        raise _NotPossibleError("it changes its logits after the head, which liger-kernel does not know")
    if importlib.util.find_spec("liger_kernel") is None:
        raise _NotPossibleError("liger-kernel is not installed (pip install 'meshbook[liger]')")


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
            "model.loss=liger: its kernel computes the sum of cross-entropies only, and this objective weights the "
            "losses of tokens; set model.loss=chunked"
        )
    if (to := autocast_dtype(hidden)) is not None:
        hidden, weight, bias = hidden.to(to), weight.to(to), None if bias is None else bias.to(to)
    # Sums over chunks in float32, as ours; the kernel's wrapper counts targets on the host, which waits for that.
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
