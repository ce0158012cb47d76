"""Greedy and sampled generation from prompts, many rows at once, with a model on any mesh.

Rows are padded on the left, so that a cache of keys and values grows by one slot for all of them. transformers builds
the masks from the padding, as for its own `generate`: for each type of attention layer, and for layers with a state,
whose inputs are zero at the padding.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache, DynamicLayer

from components.chat_template import ChatTemplate, encode_prompt
from components.config.schema.model import CAUSAL_EAGER, CAUSAL_FLASH, CAUSAL_SDPA
from components.conversation import Prompt
from components.json_collectives import all_gather_json
from components.models.anatomy import transformers_class
from components.torch_kernels import INCREMENT, cast_by_autocast, hashed, shifted, signed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SECONDS_APART = 2.0
"""About the time between two questions whether all ranks go on, where their forwards need no rank with other rows."""
_TOKENS_AT_ONCE = 1024
"""Most tokens of a forward, of which long prompts need several: it bounds the memory of activations, and its time."""
_STEP = 16
"""Padding that is computed before a row's first token."""
_SHORTEST_PREFIX = 32
"""Tokens that all prompts of a batch must begin with to be computed once."""
_ROOM = 64
"""Tokens for which a cache has room when it is enlarged."""
_ENDED_SHARE = 0.25
"""Rows that have ended leave the batch once they are this share of it: each time copies the cache of the others."""


@dataclass(frozen=True, slots=True)
class RowsForward:
    """A forward for generation: what it computes at once, and with which ranks."""

    call: Callable[..., Any]
    """Forward with the arguments of a Hugging Face causal LM, for rows that are not divided."""
    rows: int = 32
    """Most rows that a rank computes at once; their cache of keys and values takes memory."""
    keeps_cache: bool = True
    """Whether `call` supports a cache of keys and values. Without one, each row is recomputed for each of its tokens,
    one row after another, by all ranks together."""
    device: torch.device | None = None
    """Device of the tokens and the cache; None: that of the model's parameters, which may be offloaded."""
    share: tuple[int, int] = (0, 1)
    """This rank's index among the ranks that divide the rows, and their number."""
    same_rows: dist.ProcessGroup | None = None
    """Group of the ranks that compute the same rows (tp), whose first rank chooses the tokens; None: this rank only."""
    lockstep: bool = False
    """Whether a forward has collectives with ranks that compute other rows, so that all ranks must run equally many."""
    stopped: Callable[[], bool] | None = None
    """Called on all ranks before each token or every 2 seconds, with the same value; True ends the generation."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose each token from the logits."""

    temperature: float = 0.0
    """0: the most likely token; above 0: sample from softmax(logits / temperature)."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens whose probabilities reach this value (nucleus sampling,
    Holtzman et al. 2020)."""
    seed: int = 0
    """Any integer."""
    top_k: int = 0
    """Sample only from this many most likely tokens, before `top_p` applies; 0: from all."""
    first_sample: int = 0
    """Number of the sample of the first prompt; those of the next ones follow."""
    keeps_stop: bool = False
    """Whether an answer includes the stop token that ended it."""

    def choose(self, logits: torch.Tensor, indices: torch.Tensor, position: int) -> torch.Tensor:
        """Return a token for each row, (rows,) int64.

        A sampled token is a function of the logits, the seed, the number of the sample and the position in its answer:
        the token with the largest sum of logit / temperature and Gumbel noise. This samples from the softmax
        (Gumbel-max, Maddison et al. 2014). The noise is a hash of these numbers and the token, so that rounding of the
        logits changes a token only if the two largest sums are almost equal.

        Args:
            logits: (rows, vocabulary).
            indices: Index of each row's prompt, (rows,) int64 on the same device; `first_sample` is added to it.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        return self.scores(logits).add_(self._noise(logits, indices + self.first_sample, position)).argmax(-1)

    def of_prompt(self, index: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Return `choose` for the answer to one prompt, for `stream_tokens`."""
        return lambda logits, position: self.choose(logits, torch.tensor([index], device=logits.device), position)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits / temperature in float64, -inf for tokens left out by top_k and top_p. (rows, vocabulary)."""
        scores = logits.double() / self.temperature
        if self.top_p == 1 and self.top_k == 0:
            return scores
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            ordered[:, self.top_k :] = -torch.inf
        probabilities = ordered.softmax(-1)
        # By the probability of the more likely tokens; at least the most likely one is kept.
        ordered[:, 1:].masked_fill_((probabilities.cumsum(-1) - probabilities)[:, 1:] >= self.top_p, -torch.inf)
        return scores.scatter_(-1, order, ordered)

    def _noise(self, logits: torch.Tensor, samples: torch.Tensor, position: int) -> torch.Tensor:
        """Return standard Gumbel noise (rows, vocabulary) in float64: -log(-log(u)), with hashes u in (0, 1)."""
        of_samples = hashed(samples * INCREMENT + signed(self.seed))
        tokens = torch.arange(1, logits.shape[-1] + 1, device=logits.device) * INCREMENT
        bits = shifted(hashed(hashed(of_samples + position)[:, None] + tokens), 12)  # 52, exact in float64
        return bits.double().add_(0.5).mul_(2**-52).log_().neg_().log_().neg_()


_GREEDY = Sampling()


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Prompt],
    max_new_tokens: int,
    forward: RowsForward | None = None,
    sampling: Sampling = _GREEDY,
) -> list[str]:
    """Return the continuation of each prompt as text, without special tokens; an empty list after a stop."""
    answers = generate_tokens(model, tokenizer, prompts, max_new_tokens, forward, sampling)
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in answers]


@torch.no_grad()
def generate_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Prompt],
    max_new_tokens: int,
    forward: RowsForward | None = None,
    sampling: Sampling = _GREEDY,
    ends: Callable[[int, list[int]], bool] = lambda index, answer: False,
) -> list[list[int]]:
    """Return the tokens of the continuation of each prompt, without the prompt, on every rank.

    Prompts given as text are formatted with the tokenizer's chat template if it has one. An answer ends with an
    end-of-text token, with a token that ends answers of the chat template, where `ends` says so, or where the model's
    context does. Call it on all ranks with the same arguments. The ranks divide the prompts; an answer does not depend
    on the others that are generated with it, but for rounding. Equal prompts of a batch are computed once.

    Returns an empty list if the generation was stopped.

    Args:
        forward: Forward of the mesh; None: call the model itself.
        sampling: How tokens are chosen. torch's random states are not used.
        ends: Returns whether an answer, given the index of its prompt and its tokens so far, is complete. Called after
            each token, on the ranks that compute the row.
    """
    forward = forward or RowsForward(model)
    stops, context = stop_tokens(model, tokenizer), context_length(model) or 2**31
    encoded = [list(each.tokens) if isinstance(each, Prompt) else encode_prompt(tokenizer, each) for each in prompts]
    rows = [
        _Row(index, tokens, min(max_new_tokens, context - len(tokens)), partial(ends, index), sampling.keeps_stop)
        for index, tokens in enumerate(encoded)
    ]
    was_training = model.training
    model.eval()
    try:
        # Eager: layers would be recompiled for every size of the cache, up to the limit that training shares.
        with torch.compiler.set_stance("force_eager"), _own_attention(model):
            # Without one (Mamba, RWKV, GPT-1, and pp), rows are recomputed.
            has_cache = "past_key_values" in inspect.signature(transformers_class(model).forward).parameters
            if forward.keeps_cache and has_cache:
                device = forward.device or next(model.parameters()).device
                return _in_batches(rows, forward, device, stops, sampling)
            for row in rows:
                choose = sampling.of_prompt(row.index)
                for token in stream_tokens(model, (), row.prompt, row.most, choose, forward):
                    if row.take(token, stops):
                        break
    finally:
        model.train(was_training)
    return [] if forward.stopped is not None and forward.stopped() else [row.answer for row in rows]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend by transformers' own function, which takes masks of padding; under cp over whole rows too."""
    before: str = model.config._attn_implementation
    if not before.startswith((CAUSAL_SDPA, CAUSAL_FLASH, CAUSAL_EAGER)):
        yield
        return
    model.set_attn_implementation("eager" if before.startswith(CAUSAL_EAGER) else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass(slots=True)
class _Row:
    """A prompt and its answer so far."""

    index: int
    prompt: list[int]
    most: int
    """Maximum length of the answer."""
    ends: Callable[[list[int]], bool]
    keeps_stop: bool
    answer: list[int] = field(default_factory=list)

    def take(self, token: int, stops: Container[int]) -> bool:
        """Add a token, a stop token only if it is kept, and return whether the answer is complete."""
        if token not in stops or self.keeps_stop:
            self.answer.append(token)
        return token in stops or len(self.answer) >= self.most or self.ends(self.answer)


def _in_batches(
    rows: list[_Row], forward: RowsForward, device: torch.device, stops: Container[int], sampling: Sampling
) -> list[list[int]]:
    """Return the answers of all rows on every rank; an empty list if the generation was stopped.

    Rows are sorted by decreasing length, so that batches have little padding and the first one needs the most memory.
    All ranks begin a batch together: otherwise one would wait for the prompts of another, in turns.
    """
    index, ranks = forward.share
    order = sorted((row for row in rows if row.most > 0), key=lambda row: (-len(row.prompt), row.index))
    batches = -(-len(order) // (forward.rows * ranks))
    size = -(-len(order) // max(1, batches))  # over all ranks, about equal for all batches
    for start in range(0, len(order), max(1, size)):
        own = order[start : start + size][index::ranks]
        forwards, is_alive = _continued(own, forward, device, stops, sampling), bool(own)
        # Ranks of the same rows must run equally many forwards; others have clocks of their own.
        count, seconds, by_count = 1, _SECONDS_APART, forward.lockstep or forward.same_rows is not None
        while True:
            is_any_alive, seconds = _of_all_ranks(forward, device, float(is_alive), seconds)
            if not is_any_alive:
                break
            if forward.stopped is not None and forward.stopped():
                return []
            count = 1 if forward.lockstep else max(1, min(2 * count, int(_SECONDS_APART / max(seconds, 1e-6))))
            began = time.perf_counter()
            for number in itertools.count(1):
                if is_alive:
                    is_alive = next(forwards)
                elif forward.lockstep:
                    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
                    forward.call(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1)
                seconds = (time.perf_counter() - began) / number
                if number >= count if by_count else number * seconds >= _SECONDS_APART or not is_alive:
                    break
    if forward.stopped is not None and forward.stopped():
        return []
    if ranks > 1 and order:
        is_first = forward.same_rows is None or dist.get_rank(forward.same_rows) == 0
        own_answers = [[row.index, row.answer] for row in order if row.answer] if is_first else []
        for place, answer in itertools.chain.from_iterable(all_gather_json(own_answers)):
            rows[place].answer = answer
    return [row.answer for row in rows]


def _of_all_ranks(forward: RowsForward, device: torch.device, *values: float) -> list[float]:
    """Return the largest of each value over the ranks: all must run equally many forwards."""
    if forward.share[1] == 1 and forward.same_rows is None:
        return list(values)
    largest = torch.tensor(values, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return list(map(float, largest.tolist()))


def _continued(
    rows: list[_Row], forward: RowsForward, device: torch.device, stops: Container[int], sampling: Sampling
) -> Iterator[bool]:
    """Generate the tokens of rows together, and yield after each forward whether any row is left."""
    context = yield from _read_prompts(rows, forward, device)
    indices = torch.tensor([row.index for row in rows], device=device)
    live: list[_Row | None] = list(rows)
    for position in itertools.count():
        tokens = sampling.choose(context.logits, indices, position)  # (rows,)
        if forward.same_rows is not None:
            dist.broadcast(tokens, group=forward.same_rows, group_src=0)
        chosen = tokens.tolist()
        for place, token in enumerate(chosen):
            row = live[place]
            if row is not None and row.take(token, stops):
                live[place] = None
        left = [place for place, row in enumerate(live) if row is not None]
        if not left:
            yield False
            return
        yield True
        if len(live) - len(left) >= _ENDED_SHARE * len(live):
            context.select(left)
            indices = indices[torch.tensor(left, device=device)]
            live, chosen = [live[place] for place in left], [chosen[place] for place in left]
        for _ in context.read([(token,) for token in chosen]):
            yield True


def _read_prompts(rows: list[_Row], forward: RowsForward, device: torch.device) -> Generator[bool, None, _Context]:
    """Read the prompts of rows, and yield True after each forward but the last; equal prompts are read once.

    So is what all prompts begin with, such as examples, where padding may follow it.
    """
    prompts = sorted(dict.fromkeys(tuple(row.prompt) for row in rows), key=len, reverse=True)
    context, begun = _Context(forward.call, device), _common_prefix(prompts)
    if begun:
        for _ in context.read([begun]):
            yield True
        yield True
        if not context.takes_padding:
            context, begun = _Context(forward.call, device), ()
    for _ in context.read([prompt[len(begun) :] for prompt in prompts]):
        yield True
    places = {prompt: place for place, prompt in enumerate(prompts)}
    context.select([places[tuple(row.prompt)] for row in rows])
    return context


def _common_prefix(prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return what several prompts begin with, less than any of them; empty if it is short."""
    shortest = min(map(len, prompts))
    differ = (place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    prefix = prompts[0][: min(next(differ, shortest), shortest - 1)]
    return prefix if len(prompts) > 1 and len(prefix) >= _SHORTEST_PREFIX else ()


class _GrowingLayer(DynamicLayer):
    """Keys and values with room for further tokens, in autocast's dtype: rotary embeddings leave keys in float32.

    transformers' layer copies all of them for each token, and so would a cast.
    """

    keys: Any
    values: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = cast_by_autocast(layer.keys, layer.values)
        self._room = [self.keys, self.values]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens, (rows, heads, new, head_dim), and return those of all tokens."""
        used, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if end > self._room[0].shape[2]:
            self._room = [F.pad(each, (0, 0, 0, end - used + _ROOM)) for each in (self.keys, self.values)]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, used:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these rows, (rows,) int64."""
        self.keys, self.values = (each.index_select(0, beam_idx) for each in (self.keys, self.values))
        self._room = [self.keys, self.values]


class _Context:
    """Rows of tokens that a model has read, padded on the left."""

    def __init__(self, call: Callable[..., Any], device: torch.device) -> None:
        self._call, self._device = call, device
        self._cache: Any = None
        self._filled = torch.empty(1, 0, dtype=torch.int64, device=device)
        """0 where a slot of the cache is padding, (rows, slots)."""
        self._is_padded, self._joins, self._rows = False, True, 1
        self.logits = torch.empty(0)
        """Of the last tokens, (rows, vocabulary)."""

    @property
    def takes_padding(self) -> bool:
        """Whether padding may follow tokens: it is not within a window then, and does not change a state."""
        return isinstance(self._cache, Cache) and all(type(layer) is _GrowingLayer for layer in self._cache.layers)

    def select(self, places: list[int]) -> None:
        """Keep these rows, some of them perhaps several times."""
        index = torch.tensor(places, device=self._device)
        self._cache.reorder_cache(index)
        self._filled, self.logits, self._rows = self._filled[index], self.logits[index], len(places)

    def read(self, rows: Sequence[Sequence[int]]) -> Iterator[None]:
        """Read further tokens of each row, longest first, and yield after each forward but the last.

        A row joins about where its tokens begin, with a copy of the first row's cache, which its padding hides.
        """
        width, begins = len(rows[0]), [len(rows[0]) - len(row) for row in rows]
        padded = [[0] * begin + list(row) for begin, row in zip(begins, rows, strict=True)]
        self._is_padded |= begins[-1] > 0
        ids = torch.tensor(padded, device=self._device)  # (rows, width)
        filled = (torch.arange(width, device=self._device) >= torch.tensor(begins, device=self._device)[:, None]).long()
        self._filled = torch.cat([self._filled.expand(len(rows), -1), filled], dim=1)
        positions = (self._filled.cumsum(-1) - 1).clamp(min=0)[:, -width:]  # from the start of each row
        before, start = self._filled.shape[1] - width, 0
        while start < width:
            count = sum(begin < start + _STEP for begin in begins) if self._joins else len(rows)
            end = min(width, start + max(1, _TOKENS_AT_ONCE // count), *begins[count : count + 1])
            if self._cache is not None and count > self._rows:
                copies = torch.arange(count, device=self._device)
                self._cache.reorder_cache(copies.where(copies < self._rows, 0))
            self._rows = count
            output = self._call(
                input_ids=ids[:count, start:end],
                position_ids=positions[:count, start:end],
                attention_mask=self._filled[:count, : before + end] if self._is_padded else None,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self._cache = _with_room(output.past_key_values)
            start = end
            if count < len(rows) and not self.takes_padding:
                self._cache, self._joins, start = None, False, 0
            if start < width:
                yield
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        self.logits = logits[:, -1]


def _with_room(cache: Any) -> Any:
    """Return a cache whose layers of full attention take further tokens without a copy."""
    if isinstance(cache, Cache):
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                cache.layers[number] = _GrowingLayer(layer)
    return cache


@torch.no_grad()
def stream_tokens(
    model: PreTrainedModel,
    stops: Container[int],
    tokens: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[torch.Tensor, int], torch.Tensor],
    forward: RowsForward | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `tokens` as they are generated, without the stop token.

    The model must be in evaluation mode.

    Args:
        stops: `stop_tokens` of the model.
        choose: `Sampling.choose` with the number of the sample: returns a token from the logits (1, vocabulary) and its
            position.
        forward: As for `generate`.
    """
    tokens = list(tokens)
    start = len(tokens)
    forward = forward or RowsForward(model)
    device = forward.device or next(model.parameters()).device
    cache = None
    while len(tokens) < start + max_new_tokens and not (forward.stopped is not None and forward.stopped()):
        cached = 0 if cache is None else cache.get_seq_length()
        ids = torch.tensor([tokens[cached:]], device=device)  # (1, new tokens)
        positions = torch.arange(cached, len(tokens), device=device)[None]  # (1, new tokens)
        last = torch.tensor([len(tokens) - cached - 1], device=device)
        cache_options = {"past_key_values": cache, "use_cache": True} if forward.keeps_cache else {}
        output = forward.call(input_ids=ids, position_ids=positions, logits_to_keep=last, **cache_options)
        # Without one (Mamba, RWKV, GPT-1), the complete row is recomputed for each token.
        cache = getattr(output, "past_key_values", None) if forward.keeps_cache else None
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        chosen = choose(logits[:, -1], len(tokens) - start)  # (1,)
        if dist.is_initialized():
            dist.broadcast(chosen, src=0)
        token = int(chosen)
        if token in stops:
            break
        tokens.append(token)
        yield token


def context_length(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a model's input; None if its config does not state it."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end an answer: those of the generation config, and those of the chat template."""
    declared = model.generation_config.eos_token_id
    tokens = declared if isinstance(declared, list) else [declared]
    return {token for token in (*tokens, *ChatTemplate(tokenizer).stop_tokens.values()) if token is not None}
