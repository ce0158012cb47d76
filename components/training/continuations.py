"""Log-probabilities of continuations, and whether greedy decoding would produce them, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.data.batches import Padding
from components.training.forward import local_batch, score_tokens
from components.training.loss import sum_over_ranks
from components.training.objectives import Chunk, TokenLoss
from components.training.objectives.cross_entropy import log_softmax, upcast
from components.training.setup.prepared import Prepared

_GREEDY_LOSS = math.log(2) / 2
"""A token that is not the most likely one has at most half of the probability: a loss of at least log(2)."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens whose last ones are scored."""

    tokens: tuple[int, ...]
    """Context and continuation, at most one token more than the model's context length."""
    scored: int
    """Number of tokens of the continuation, at least 1 and less than all."""

    @property
    def length(self) -> int:
        """Number of tokens that the model takes: all but the last."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Requests that one rank computes at once."""

    length: int
    """Padded length of the rows, the same on all ranks."""
    indices: tuple[int, ...]
    """Requests of the rows."""
    counts: bool
    """Whether the requests are this rank's own. A rank without requests left computes one of another rank too, since
    the forward of a sharded model is a collective."""


@dataclass(frozen=True, slots=True)
class RequestBatches:
    """How requests are divided into forward passes."""

    dp_rank: int
    dp_size: int
    padding: Padding
    """Padding of rows of up to the model's context length."""
    tokens: int
    """Tokens of a forward pass of one rank, unless one row has more."""
    rows: int | None = None
    """Rows of a forward pass of one rank; None: given by `tokens`."""

    def split(self, lengths: Sequence[int]) -> list[ForwardPass]:
        """Return this rank's forward passes over requests of the given lengths; all ranks have the same number.

        Requests are sorted by decreasing length, so that rows have little padding and the first pass needs the most
        memory.
        """
        order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        passes, start = [], 0
        while start < len(order):
            length = self.padding.length_of(lengths[order[start]])
            rows = self.rows or max(1, self.tokens // length)
            of_all = order[start : start + rows * self.dp_size]
            own = of_all[self.dp_rank :: self.dp_size]
            passes.append(ForwardPass(length, tuple(own or of_all[:1]), counts=bool(own)))
            start += len(of_all)
        return passes


class SignedLogProbability(TokenLoss):
    """Token loss with a sign: the loss if the target is the most likely token, else the negative loss.

    The sign is free because losses are not negative; `decode` reads both. The token of the smallest id counts as the
    most likely of several equally likely ones.
    """

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Raise TypeError: these values have no meaningful sum."""
        raise TypeError("signed log-probabilities exist per token only")

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the values (batch, seq) of logits (batch, seq, vocabulary); 0 where the target is ignored."""
        is_target = targets != IGNORED
        scores = upcast(logits[is_target])  # (targets, vocabulary)
        values, _ = self.of_chunk(Chunk(scores, targets[is_target], per_token=True, with_gradient=False))
        return scores.new_zeros(targets.shape).masked_scatter(is_target, values)

    def of_chunk(self, chunk: Chunk) -> tuple[torch.Tensor, None]:
        """Return the values (tokens,) of a chunk: see `TokenLoss`. They have no gradient."""
        vocabulary, (index, is_local) = chunk.vocabulary, chunk.position()
        log_probs, _ = log_softmax(chunk.scores, vocabulary.group, with_log_sum=False)  # (tokens, local vocabulary)
        log_prob = log_probs.gather(1, index)[:, 0].where(is_local, 0)  # (chunk,)
        largest, best = log_probs.max(-1)  # (chunk,), (chunk,)
        best += vocabulary.first
        if vocabulary.group is not None:
            dist.all_reduce(log_prob, group=vocabulary.group)
            overall = largest.clone()
            dist.all_reduce(overall, dist.ReduceOp.MAX, group=vocabulary.group)
            best = best.where(largest == overall, vocabulary.size)
            dist.all_reduce(best, dist.ReduceOp.MIN, group=vocabulary.group)
        return torch.where(best == chunk.targets, -log_prob, log_prob) * (chunk.targets != IGNORED), None

    @staticmethod
    def decode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of values, and whether each is of a token that is not the most likely one."""
        return -values.abs(), ~(values > -_GREEDY_LOSS)  # NaN is a miss


@torch.no_grad()
def score_continuations(
    model: Prepared, requests: Sequence[Continuation], batches: RequestBatches, stopped: Callable[[], bool]
) -> list[tuple[float, bool]] | None:
    """Return the log-probability of each continuation, and whether greedy decoding would produce it. A collective.

    Call it on all ranks with the same requests. Each data-parallel rank computes a part of them; the results are
    summed over all ranks, so that they agree. The model must be in evaluation mode.

    Args:
        stopped: Called before each forward pass; must return the same value on all ranks. True ends the scoring, and
            None is returned.
    """
    settings = model.settings
    scores = torch.zeros(len(requests), 2, dtype=torch.float64, device=settings.device)  # log-probability, misses
    for each in batches.split([request.length for request in requests]):
        if stopped():
            return None
        batch = _batch([requests[index] for index in each.indices], each.length, batches.padding.token_id)
        local = local_batch(batch.to(settings.device), settings)
        values = score_tokens(model, local, SignedLogProbability())  # (rows, seq / cp)
        if each.counts and values is not None and settings.counts_tokens:
            log_probs, is_miss = SignedLogProbability.decode(values)
            of_rows = torch.stack([log_probs.double().sum(1), is_miss.double().sum(1)], dim=1)  # (rows, 2)
            scores[torch.tensor(each.indices, device=settings.device)] = of_rows
    sums = sum_over_ranks(scores).tolist()
    return [(log_prob, misses == 0) for log_prob, misses in sums]


def _batch(requests: Sequence[Continuation], length: int, padding: int) -> Batch:
    """Return the requests as rows of `length` tokens, with the continuations as targets."""
    input_ids = torch.full((len(requests), length), padding)
    targets = torch.full((len(requests), length), IGNORED)
    for row, each in enumerate(requests):
        input_ids[row, : each.length] = torch.tensor(each.tokens[:-1])
        targets[row, each.length - each.scored : each.length] = torch.tensor(each.tokens[-each.scored :])
    return Batch(input_ids=input_ids, targets=targets, target_count=sum(each.scored for each in requests))
