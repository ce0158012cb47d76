"""lm-eval's interface to a model, over a model that is sharded on a mesh. Imports lm-eval, which is optional."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from components import distributed, models
from components.batch import Batch
from components.chat_template import ChatTemplate
from components.config.schema.data import IGNORED
from components.conversation import Conversation
from components.data.batches import Padding
from components.models.generation import GenerationForward
from components.protocol.errors import ConfigError
from components.training.forward import local_batch, score_tokens
from components.training.loss import sum_over_ranks
from components.training.objectives import Vocabulary
from components.training.objectives.cross_entropy import log_softmax, upcast
from components.training.samples import GenerationRun, gathered_weights
from components.training.setup.prepared import Prepared

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

SAMPLING_KEYS = ("do_sample", "temperature", "top_p", "top_k")
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
GENERATION_KEYS = frozenset(["until", *SAMPLING_KEYS, *LENGTH_KEYS])
"""Keys of a task's generation_kwargs that `generate_until` supports."""
GREEDY_LOSS = math.log(2) / 2
"""A token that is not the most likely one has at most half of the probability: a loss of at least log(2)."""


class Stopped(Exception):
    """A stop request ended the evaluation; raised on all ranks."""


class MeshLM(TemplateLM):
    """A model on any mesh, computed like held-out losses: without an export, and without logits of a whole batch.

    Every rank passes all requests and gets all results. lm-eval sees one process; `score_continuations` divides the
    requests over the data-parallel ranks. Results equal those of lm-eval's own Hugging Face backend in one process.
    """

    def __init__(
        self,
        model: Prepared,
        tokenizer: PreTrainedTokenizerBase,
        batches: RequestBatches,
        max_length: int,
        run: GenerationRun,
    ) -> None:
        """Wrap a model in evaluation mode.

        Args:
            max_length: Context length of the model in tokens.
        """
        super().__init__()
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._stops = models.stop_tokens(model.module, tokenizer)
        self._model, self._batches, self._run = model, batches, run
        self._max_length = max_length

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Context of texts without one."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer; part of lm-eval's interface for chat templates."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, with the tokenizer's special tokens unless the text begins with them."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the tokenizer's chat template formats it."""
        continues = {} if add_generation_prompt else {"continue_final_message": True}
        conversation = Conversation("evaluation.apply_chat_template=true", chat_history, template_kwargs=continues)
        try:
            return self._template.render(conversation, add_generation_prompt=add_generation_prompt).text
        except ConfigError as error:
            raise ConfigError(f"{error}; or set evaluation.apply_chat_template=false") from error

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would produce it."""
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text; one longer than the context is cut into windows."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._max_length, 1)
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append((("", text), context, continuation))
                owners.append(index)
        sums = [0.0] * len(requests)
        for index, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[index] += log_prob
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the scores of requests (texts, tokens of the context, tokens of the continuation)."""
        limit, cut, continuations = self._max_length + 1, 0, []
        for (_, text), context, continuation in requests:
            if not 0 < len(continuation) < limit:
                raise ConfigError(
                    f"evaluation.tasks: the continuation {text!r:.60} has {len(continuation)} tokens; it must have at "
                    f"least 1, and at most the {self._max_length} of the model's context; change the task"
                )
            tokens = context + continuation
            cut += len(tokens) > limit
            continuations.append(Continuation(tuple(tokens[-limit:]), len(continuation)))
        if cut:
            self._run.print(f"tasks: {cut} requests are longer than the model's context and lose their beginning")
        if not continuations:
            return []
        scores = score_continuations(self._model, continuations, self._batches, self._run.agreed_to_stop)
        if scores is None:
            raise Stopped
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated continuation of each context, up to a stop sequence. One request at a time."""
        model, run = self._model, self._run
        with (
            gathered_weights(model, run),
            distributed.unsharded_rows(model.called, run.mesh, model.parallelism) as forward,
        ):
            return [self._generate(index, request, forward) for index, request in enumerate(requests)]

    def _generate(self, index: int, request: Instance, forward: GenerationForward) -> str:
        context, options = request.args
        settings = normalize_gen_kwargs(options)
        until = handle_stop_sequences(list(settings["until"]), self.tokenizer.decode(self.eot_token_id))
        longest = settings["max_gen_toks"]
        if longest >= self._max_length:
            raise ConfigError(
                f"evaluation.tasks: a task generates max_gen_toks={longest} tokens, which must be less than the "
                f"{self._max_length} of the model's context; change the task"
            )
        sampling = models.Sampling(
            temperature=settings.get("temperature", 0.0) if settings["do_sample"] else 0.0,
            top_p=settings.get("top_p", 1.0),
            top_k=settings.get("top_k", 0),
        )
        choose = partial(sampling.choose, prompt=index)
        tokens = self.tok_encode(context)[-(self._max_length - longest) :]
        stream = models.stream_tokens(
            self._model.module, self._stops, tokens, longest, choose, forward, self._run.agreed_to_stop
        )
        answer: list[int] = []
        text = ""
        for token in stream:
            answer.append(token)
            text = str(self.tokenizer.decode(answer, skip_special_tokens=True))
            if any(stop and stop in text for stop in until):
                break
        if self._run.agreed_to_stop():
            raise Stopped
        return str(postprocess_generated_text(text, until, None))


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


class SignedLogProbability:
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
        values, _ = self.of_chunk(scores, targets[is_target], Vocabulary(), per_token=True, with_gradient=False)
        return scores.new_zeros(targets.shape).masked_scatter(is_target, values)

    def of_chunk(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: Vocabulary,
        weights: torch.Tensor | None = None,
        values: Mapping[str, torch.Tensor] | None = None,
        *,
        per_token: bool,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, None]:
        """Return the values (chunk,) of a chunk of tokens: see `TokenLoss`. They have no gradient."""
        log_probs, _ = log_softmax(scores, vocabulary.group, with_log_sum=False)  # (chunk, this rank's vocabulary)
        index, is_real = targets - vocabulary.first, targets != IGNORED
        is_local = is_real & (index >= 0) & (index < scores.shape[-1])
        index = index.clamp(0, scores.shape[-1] - 1)[:, None]  # (chunk, 1)
        log_prob = log_probs.gather(1, index)[:, 0].where(is_local, 0)  # (chunk,)
        largest, best = log_probs.max(-1)  # (chunk,), (chunk,)
        best += vocabulary.first
        if vocabulary.group is not None:
            dist.all_reduce(log_prob, group=vocabulary.group)
            overall = largest.clone()
            dist.all_reduce(overall, dist.ReduceOp.MAX, group=vocabulary.group)
            best = best.where(largest == overall, vocabulary.size)
            dist.all_reduce(best, dist.ReduceOp.MIN, group=vocabulary.group)
        return torch.where(best == targets, -log_prob, log_prob) * is_real, None

    @staticmethod
    def decode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of values, and whether each is of a token that is not the most likely one."""
        return -values.abs(), ~(values > -GREEDY_LOSS)  # NaN is a miss


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
