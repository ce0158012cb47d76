"""LM head and token loss in one, without ever materializing the logits of all tokens.

The forward takes tokens in chunks and computes the logits, the loss and the gradients of each at once, so that the
three matmuls are done once each and logits live as long as their chunk (the idea of Liger's fused linear
cross-entropy, Hsu et al. 2024, in plain PyTorch). Recomputing in the backward would hold no gradient of the weight
meanwhile, at the price of a fourth matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from components.config.schema.data import IGNORED
from components.training.objectives.contract import NOT_SHARDED, TokenLoss, Vocabulary

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Logits of a chunk: large enough that matmuls run at full speed, and that adding to the gradient of the weight after
each chunk (as many values as the weight has) costs little beside them."""
TOKEN_MULTIPLE = 128
"""Numbers of tokens are rounded up to it, so that an allocator meets few sizes."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a loss in chunks needs of the LM head besides its weight."""

    vocabulary: Vocabulary = NOT_SHARDED
    """How the weight's rows are sharded."""
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The model's elementwise transform of its logits (Gemma's softcapping, Cohere's scale); None: there is none."""
    backward_twice: bool = False
    """A pipeline schedule that splits the backward asks for gradients twice."""


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return how many tokens a chunk may have."""
    return max(1, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"]) // vocabulary)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the type that autocast would compute a product of `tensor` in; None: its own."""
    kind = tensor.device.type
    if (
        tensor.dtype == torch.float64
        or not torch.amp.is_autocast_available(kind)
        or not torch.is_autocast_enabled(kind)
    ):
        return None
    return torch.get_autocast_dtype(kind)


@dataclass(frozen=True, slots=True)
class Targets:
    """What the tokens of a batch predict."""

    ids: torch.Tensor  # (tokens,) int64
    """The targets; IGNORED where there is no loss."""
    count: int | None = None
    """Host-side upper bound on the number of targets that are not ignored: the other tokens then cost nothing. A bound
    that is too small makes the loss NaN, never wrong."""
    weights: torch.Tensor | None = None  # (tokens,)
    """Factor of each token's loss; None: 1."""


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
        weight: (vocabulary or this rank's shard of it, hidden); bias: (its rows,).
        per_token: Return the losses (tokens,), 0 where the target is ignored; without a gradient.

    Returns a scalar in float32, or in float64 for float64 hidden states; under tp the same on every rank, the gradient
    of `hidden` being this rank's part of a sum.
    """
    ids, count, weights = targets.ids, targets.count, targets.weights
    known = None if count is None else max(1, -(-count // TOKEN_MULTIPLE)) * TOKEN_MULTIPLE
    tokens, kept, missed = len(ids), None, None
    if known is not None and known < tokens:
        order = (ids == IGNORED).to(torch.uint8).argsort(stable=True)  # (tokens,), those with a target first
        kept, left_out = order[:known], order[known:]
        missed = (ids.index_select(0, left_out) != IGNORED).any()
        hidden, ids = hidden.index_select(0, kept), ids.index_select(0, kept)
        weights = None if weights is None else weights.index_select(0, kept)
    wanted = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    call = _Call(head, token_loss, weights, per_token, wanted)  # type: ignore[arg-type]
    loss: torch.Tensor = _LinearTokenLoss.apply(hidden, weight, bias, ids, call)
    if per_token and kept is not None:
        loss = loss.new_zeros(tokens).index_copy(0, kept, loss)
    return loss if missed is None else loss.masked_fill(missed, torch.nan)


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of the loss computes."""

    head: Head
    token_loss: TokenLoss
    weights: torch.Tensor | None  # (tokens,)
    per_token: bool
    wanted: tuple[bool, bool, bool]
    """Whether the gradients of hidden, weight and bias are."""


class _LinearTokenLoss(torch.autograd.Function):
    """The loss; its gradients wait for the backward, which scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        ctx.twice = call.head.backward_twice
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        kind, dtype = hidden.device.type, autocast_dtype(hidden)
        if dtype is not None:
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with nullcontext() if dtype is None else torch.autocast(kind, enabled=False):
            loss, ctx.gradients = _over_chunks(hidden, weight, bias, targets, call)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss was asked for its gradients twice: they are given away the first time")
        gradients = ctx.gradients
        if ctx.twice:
            scaled = [None if each is None else each * grad for each in gradients]
        else:
            scaled = [None if each is None else each.mul_(grad) for each in gradients]
            ctx.gradients = None
        typed = [None if each is None else each.to(to) for each, to in zip(scaled, ctx.dtypes, strict=True)]
        return (*typed, None, None)


def _over_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, call: _Call
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Return the loss and the gradients of hidden, weight and bias, as far as they are wanted."""
    vocabulary, wanted = call.head.vocabulary, call.wanted
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    largest = len(weight) if vocabulary.group is None else vocabulary.largest_shard
    chunks = max(1, -(-len(hidden) // chunk_tokens(largest, hidden.device)))
    loss = torch.zeros(len(hidden) if call.per_token else (), dtype=exact, device=hidden.device)
    # What chunks add up to is kept exact; one chunk alone is one matmul, which is rounded once anyway.
    summed = exact if chunks > 1 else weight.dtype
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=summed) if wanted[1] else None
    grad_bias = torch.zeros_like(weight[:, 0], dtype=exact) if wanted[2] else None
    size = max(1, -(-len(hidden) // chunks))
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        rows, answer = hidden[chunk], targets[chunk]
        logits = F.linear(rows, weight, bias)  # (chunk, vocabulary)
        chunk_loss, grad = _loss_of_chunk(logits, answer, None if call.weights is None else call.weights[chunk], call)
        if call.per_token:
            loss[chunk] = chunk_loss
        else:
            loss += chunk_loss
        real = (answer != IGNORED).to(rows.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[chunk]).mul_(real[:, None])
        if grad_weight is not None:
            _add_product(grad_weight, grad.t(), rows * real[:, None])
        if grad_bias is not None:
            grad_bias += (real @ grad).to(exact)
    return loss, (grad_hidden, grad_weight, grad_bias)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, some rows at a time where the types differ: the product is not held as a whole."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    for rows, part in zip(total.chunk(8), left.chunk(8), strict=True):
        rows += part @ right


def _loss_of_chunk(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, call: _Call
) -> tuple[torch.Tensor, Any]:
    """Return the loss of a chunk and the gradient of its logits (chunk, vocabulary)."""
    with_gradient, after = any(call.wanted), call.head.after
    changed = logits
    if after is not None:
        logits.requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            changed = after(logits)
    scores = changed.detach()
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    loss, gradient = call.token_loss.of_chunk(
        scores,
        targets,
        call.head.vocabulary,
        None if weights is None else weights.to(scores.dtype),
        per_token=call.per_token,
        with_gradient=with_gradient,
    )
    if gradient is None:
        return loss, None
    gradient = gradient.to(changed.dtype)
    if after is not None:
        (gradient,) = torch.autograd.grad(changed, logits, gradient)
    return loss, gradient
