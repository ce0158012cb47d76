"""LM head fused with the token loss, without materializing the logits of all tokens.

The forward computes the logits, the loss and the gradients chunk by chunk, so that each of the three matmuls is done
once and logits are freed with their chunk (the method of Liger's fused linear cross-entropy, Hsu et al. 2024, in plain
PyTorch). The alternative, recomputing the logits in the backward, would not keep the weight's gradient in memory
between forward and backward, but needs a fourth matmul.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from components.config.compute_rules import CHUNK_LOGITS
from components.config.schema.data import IGNORED
from components.torch_kernels import active_autocast_dtype
from components.training.objectives.base import Chunk, TokenLoss, Vocabulary
from components.training.objectives.cross_entropy import CrossEntropy, upcast

_TOKEN_MULTIPLE = 128
"""Numbers of tokens are rounded up to a multiple of it, so that tensors have few distinct sizes in the allocator."""


@dataclass(frozen=True, slots=True)
class Head:
    """Properties of the LM head, besides its weight, that the chunked loss needs."""

    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    """Sharding of the weight along the vocabulary."""
    logits_transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The model's elementwise transform of its logits (Gemma's softcapping, Cohere's scale); None: identity."""
    backward_twice: bool = False
    """Whether the backward runs twice, as in pipeline schedules that split it."""
    chunk_logits: int | None = None
    """Number of logits of a chunk, the same on all ranks that share the vocabulary; None: by the type of the device."""
    compiled: bool = False
    """Whether the loss of a chunk is compiled, which fuses its passes over the logits into two."""


def chunk_tokens(vocabulary: int, device: torch.device, logits: int | None = None) -> int:
    """Return the maximum number of tokens of a chunk. logits: `Head.chunk_logits`."""
    return max(1, (logits or CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"])) // vocabulary)


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the tokens of a batch."""

    ids: torch.Tensor  # (tokens,) int64
    """The targets; IGNORED where there is no loss."""
    count: int | None = None
    """Host-side upper bound on the number of targets that are not ignored; the remaining tokens skip all matmuls. A
    bound that is too small makes the loss NaN rather than wrong. None: unknown."""
    weights: torch.Tensor | None = None  # (tokens,)
    """Factor of each token's loss; None: 1."""
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each (tokens, ...)
    """Values per token for the token loss: see `Chunk.values`."""

    def select(self, kept: torch.Tensor | slice) -> Targets:
        """Return the targets of some of the tokens. kept: their indices."""
        weights = None if self.weights is None else self.weights[kept]
        return Targets(self.ids[kept], self.count, weights, {name: value[kept] for name, value in self.values.items()})


def linear_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    head: Head,
    token_loss: TokenLoss,
    *,
    per_token: bool = False,
) -> torch.Tensor:
    """Return the sum of the token losses of `hidden @ weight.T + bias`, or the losses themselves.

    Args:
        hidden: (tokens, hidden).
        weight: (vocabulary, hidden), or this rank's shard of its rows; bias: (rows of the weight,).
        per_token: Return the losses (tokens,), 0 where the target is ignored; without a gradient.

    Returns a scalar in float32, or in float64 for float64 hidden states. Under tp it is the same on every rank, and the
    gradient of `hidden` is a partial sum over tp.
    """
    ids, count = targets.ids, targets.count
    max_tokens = None if count is None else max(1, -(-count // _TOKEN_MULTIPLE)) * _TOKEN_MULTIPLE
    tokens, kept, is_incomplete = len(ids), None, None
    if max_tokens is not None and max_tokens < tokens:
        order = (ids == IGNORED).to(torch.uint8).argsort(stable=True)  # (tokens,), tokens with a target first
        kept, left_out = order[:max_tokens], order[max_tokens:]
        is_incomplete = (ids.index_select(0, left_out) != IGNORED).any()
        hidden, targets = hidden.index_select(0, kept), targets.select(kept)
    needs_grad = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    call = _Call(head, token_loss, targets, per_token, needs_grad)  # type: ignore[arg-type]
    loss: torch.Tensor = _LinearTokenLoss.apply(hidden, weight, bias, call)
    if per_token and kept is not None:
        loss = loss.new_zeros(tokens).index_copy(0, kept, loss)
    return loss if is_incomplete is None else loss.masked_fill(is_incomplete, torch.nan)


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call that are not differentiated."""

    head: Head
    token_loss: TokenLoss
    targets: Targets
    per_token: bool
    needs_grad: tuple[bool, bool, bool]
    """Whether the gradients of hidden, weight and bias are needed."""


class _LinearTokenLoss(torch.autograd.Function):
    """Loss whose gradients are computed in the forward; the backward scales them by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        ctx.twice = call.head.backward_twice
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        kind, autocast = hidden.device.type, active_autocast_dtype(hidden)
        # Without autocast only a trained head over frozen weights in 16 bits has another dtype.
        dtype = autocast or hidden.dtype
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with nullcontext() if autocast is None else torch.autocast(kind, enabled=False):
            loss, ctx.gradients = _over_chunks(hidden, weight, bias, call)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the backward of the chunked loss ran twice: the first run frees its gradients")
        gradients = ctx.gradients
        if ctx.twice:
            scaled = [None if gradient is None else gradient * grad for gradient in gradients]
        else:
            scaled = [None if gradient is None else gradient.mul_(grad) for gradient in gradients]
            ctx.gradients = None
        typed = [None if each is None else each.to(to) for each, to in zip(scaled, ctx.dtypes, strict=True)]
        return (*typed, None)


def _over_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Return the loss and the gradients of hidden, weight and bias; None for those that are not needed."""
    vocabulary, needs_grad = call.head.vocabulary, call.needs_grad
    accumulate_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    # tp ranks must cut alike, since each chunk has collectives: all of them take the largest shard of the vocabulary.
    largest = len(weight) if vocabulary.group is None else vocabulary.largest_shard
    chunks = max(1, -(-len(hidden) // chunk_tokens(largest, hidden.device, call.head.chunk_logits)))
    loss = torch.zeros(len(hidden) if call.per_token else (), dtype=accumulate_dtype, device=hidden.device)
    # Sums over chunks are accumulated in float32 or more; a single chunk is one matmul, rounded once in any case.
    weight_grad_dtype = accumulate_dtype if chunks > 1 else weight.dtype
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=weight_grad_dtype) if needs_grad[1] else None
    grad_bias = torch.zeros_like(weight[:, 0], dtype=accumulate_dtype) if needs_grad[2] else None
    size = max(1, -(-len(hidden) // chunks))  # equal chunks: a small last one would cost a matmul of its own
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        rows, targets = hidden[chunk], call.targets.select(chunk)
        logits = F.linear(rows, weight, bias)  # (chunk, vocabulary)
        chunk_loss, grad = _loss_of_chunk(logits, targets, call)
        if call.per_token:
            loss[chunk] = chunk_loss
        else:
            loss += chunk_loss
        is_target = (targets.ids != IGNORED).to(rows.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[chunk]).mul_(is_target[:, None])
        if grad_weight is not None:
            _add_matmul(grad_weight, grad.t(), rows * is_target[:, None])
        if grad_bias is not None:
            grad_bias += (is_target @ grad).to(accumulate_dtype)
    return loss, (grad_hidden, grad_weight, grad_bias)


def _add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, whose dtype may be wider: cuBLAS then adds in that dtype, in one kernel. Elsewhere
    it is added an eighth of the rows at a time, to hold a small temporary only."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.hip is None:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        for rows, part in zip(total.chunk(8), left.chunk(8), strict=True):
            rows += part @ right


def _loss_of_chunk(logits: torch.Tensor, targets: Targets, call: _Call) -> tuple[torch.Tensor, Any]:
    """Return the loss of a chunk and the gradient of its logits (chunk, vocabulary)."""
    with_gradient, transform = any(call.needs_grad), call.head.logits_transform
    transformed = logits
    if transform is not None:
        logits.requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            transformed = transform(logits)
    chunk = Chunk(
        transformed.detach(),
        targets.ids,
        call.head.vocabulary,
        targets.weights,
        targets.values,
        per_token=call.per_token,
        with_gradient=with_gradient,
    )
    loss, gradient = _of_logits_function(logits, call)(chunk, call.token_loss)
    if gradient is None:
        return loss, None
    if transform is not None:
        (gradient,) = torch.autograd.grad(transformed, logits, gradient)
    return loss, gradient


def _of_logits(chunk: Chunk, token_loss: TokenLoss) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss of a chunk, computed in float32 or more, and the gradient in the dtype of its logits."""
    scores = upcast(chunk.scores)
    weights = None if chunk.weights is None else chunk.weights.to(scores.dtype)
    loss, gradient = token_loss.of_chunk(replace(chunk, scores=scores, weights=weights))
    return loss, None if gradient is None else gradient.to(chunk.scores.dtype)


_OfLogits = Callable[[Chunk, TokenLoss], tuple[torch.Tensor, torch.Tensor | None]]


def _of_logits_function(logits: torch.Tensor, call: _Call) -> _OfLogits:
    """Return `_of_logits`, compiled where it is configured and has no collectives.

    The compiler rounds constants to float32, so it is not used for float64.
    """
    is_plain = isinstance(call.token_loss, CrossEntropy) and not call.token_loss.near_one
    is_plain = is_plain and call.head.vocabulary.group is None
    return _compiled() if call.head.compiled and is_plain and logits.dtype != torch.float64 else _of_logits


@functools.cache
def _compiled() -> _OfLogits:
    """Return one compiled function for all calls, so that they share its graphs."""
    compiled = torch.compile(_of_logits, fullgraph=True)

    def call_compiled(chunk: Chunk, token_loss: TokenLoss) -> tuple[torch.Tensor, torch.Tensor | None]:
        for each in (chunk.scores, chunk.targets, chunk.weights):
            if each is not None:
                torch._dynamo.maybe_mark_dynamic(each, 0)  # the number of tokens depends on the batch
        result: tuple[torch.Tensor, torch.Tensor | None] = compiled(chunk, token_loss)
        return result

    return call_compiled
