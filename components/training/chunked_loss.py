"""Linear layer and cross-entropy in one, without ever holding the logits of all tokens.

Tokens are taken in chunks. The forward computes each chunk's logits, its loss, and at once its gradients, so that the
three matrix products of the usual way are done once each and logits live as long as their chunk (the idea of Liger's
fused linear cross-entropy, Hsu et al. 2024, in plain PyTorch). Recomputing in the backward would hold no gradient
of the weight meanwhile, at the price of a fourth product.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from components.training.loss import IGNORED

if TYPE_CHECKING:
    from components.training.objectives.objective import Objective

CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Logits of a chunk: large enough that products run at full speed, and what is added to the weight's gradient after
each chunk (as many values as the weight has) is little beside them."""
TOKEN_MULTIPLE = 128
"""Numbers of tokens are rounded up to it, so that an allocator meets few sizes."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the loss must know of the head besides its weight."""

    group: dist.ProcessGroup | None = None
    """Ranks that have the other words of the vocabulary (tp); None: this rank has all."""
    first_word: int = 0
    """The first word that this rank has."""
    largest_shard: int = 0
    """Vocabulary rows of the largest shard over `group`. All ranks derive the number of chunks from it: each chunk is a
    collective."""
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What the model does to its logits, word by word (Gemma's softcapping, Cohere's scale); None: nothing."""
    backward_twice: bool = False
    """A pipeline schedule that splits the backward asks for gradients twice."""
    vocabulary: int = 0
    """Vocabulary rows of all ranks of `group`; 0: as many as there are logits."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator."""


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


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    head: Head,
    target_count: int | None = None,
    objective: Objective | None = None,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of `hidden @ weight.T + bias`.

    Args:
        hidden: (tokens, hidden).
        weight: (vocabulary or this rank's words, hidden); bias: (its words,).
        targets: (tokens,) int64; IGNORED where nothing is predicted.
        target_count: At most so many targets are not ignored, as the host knows; the other tokens then cost nothing.
            A count that is too small makes the loss NaN, never wrong.
        objective: Whose label smoothing and z-loss are computed; None: neither.

    Returns a scalar in float32, or in float64 for float64 hidden states; under tp the same on every rank, the gradient
    of `hidden` being this rank's part of a sum.
    """
    known = None if target_count is None else max(1, -(-target_count // TOKEN_MULTIPLE)) * TOKEN_MULTIPLE
    missed: Any = None
    if known is not None and known < len(targets):
        order = (targets == IGNORED).to(torch.uint8).argsort(stable=True)  # (tokens,), those with a target first
        kept, left_out = order[:known], order[known:]
        missed = (targets.index_select(0, left_out) != IGNORED).any()
        hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
    wanted = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    if objective is not None:
        head = replace(head, label_smoothing=objective.label_smoothing, z_loss=objective.z_loss)
    loss = _LinearCrossEntropy.apply(hidden, weight, bias, targets, head, wanted)
    return loss if missed is None else loss.masked_fill(missed, torch.nan)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss; its gradients wait for the backward, which scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        wanted: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        ctx.twice = head.backward_twice
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        kind, dtype = hidden.device.type, autocast_dtype(hidden)
        if dtype is not None:
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with nullcontext() if dtype is None else torch.autocast(kind, enabled=False):
            loss, ctx.gradients = _over_chunks(hidden, weight, bias, targets, head, wanted)
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
        return *(None if each is None else each.to(to) for each, to in zip(scaled, ctx.dtypes, strict=True)), *[
            None
        ] * 3


def _over_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    head: Head,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Return the loss and the gradients of hidden, weight and bias, as far as they are wanted."""
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    vocabulary = len(weight) if head.group is None else head.largest_shard
    chunks = max(1, -(-len(hidden) // chunk_tokens(vocabulary, hidden.device)))
    loss = torch.zeros((), dtype=exact, device=hidden.device)
    # What chunks add up to is kept exact; one chunk alone is one product, which is rounded once anyway.
    summed = exact if chunks > 1 else weight.dtype
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=summed) if wanted[1] else None
    grad_bias = torch.zeros_like(weight[:, 0], dtype=exact) if wanted[2] else None
    size = max(1, -(-len(hidden) // chunks))
    for start in range(0, len(hidden), size):
        rows, answer = hidden[start : start + size], targets[start : start + size]
        logits = F.linear(rows, weight, bias)  # (chunk, words)
        chunk_loss, grad = _cross_entropy(logits, answer, head, any(wanted))
        loss += chunk_loss
        real = (answer != IGNORED).to(rows.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[start : start + size]).mul_(real[:, None])
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


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, head: Head, with_gradient: bool
) -> tuple[torch.Tensor, Any]:
    """Return the loss of a chunk and the gradient of its logits (chunk, words), of ignored targets' rows any value."""
    changed = logits
    if head.after is not None:
        logits.requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            changed = head.after(logits)
    scores = changed.detach()
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    log_probabilities, log_sum = _log_softmax(scores, head.group, bool(head.z_loss))
    place, real = targets - head.first_word, targets != IGNORED
    here = real & (place >= 0) & (place < scores.shape[-1])
    place = place.clamp(0, scores.shape[-1] - 1)[:, None]  # (chunk, 1)
    smoothing, words = head.label_smoothing, head.vocabulary or scores.shape[-1]
    of_targets = log_probabilities.gather(1, place)[:, 0].where(here, 0)  # (chunk,)
    if smoothing:
        of_targets = (1 - smoothing) * of_targets + smoothing / words * log_probabilities.sum(-1) * real
    picked = of_targets.sum()
    if head.group is not None:
        dist.all_reduce(picked, group=head.group)
    loss = -picked
    if log_sum is not None:
        loss = loss + head.z_loss * (log_sum.square() * real).sum()
    if not with_gradient:
        return loss, None
    gradient = log_probabilities.exp_()
    if log_sum is not None:
        gradient *= 1 + 2 * head.z_loss * log_sum[:, None]
    gradient.scatter_add_(1, place, (smoothing - 1) * here[:, None].to(scores.dtype))
    if smoothing:
        gradient -= smoothing / words
    gradient = gradient.to(changed.dtype)
    if head.after is not None:
        (gradient,) = torch.autograd.grad(changed, logits, gradient)
    return loss, gradient


def _log_softmax(
    scores: torch.Tensor, group: dist.ProcessGroup | None, with_log_sum: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities (chunk, words) over the words of all ranks of `group`, and the log-sums (chunk,)."""
    if group is None:
        return scores.log_softmax(-1), scores.logsumexp(-1) if with_log_sum else None
    own = scores.logsumexp(-1)  # (chunk,)
    top = own.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    whole = (own - top).exp_()
    dist.all_reduce(whole, group=group)
    log_sum = top + whole.log_()
    return scores - log_sum[:, None], log_sum if with_log_sum else None
