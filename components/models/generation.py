"""Greedy and sampled generation from prompts with a model on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components.chat_template import ChatTemplate
from components.conversation import Conversation, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class GenerationForward(Protocol):
    """Forward of a mesh for complete rows that all its ranks pass in."""

    @property
    def call(self) -> Callable[..., Any]:
        """Forward with the arguments of a Hugging Face causal LM."""

    @property
    def multiple(self) -> int:
        """Row lengths must be multiples of this."""

    @property
    def keeps_cache(self) -> bool:
        """Whether `call` supports a cache of keys and values."""


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

    def choose(self, logits: torch.Tensor, prompt: int, position: int) -> torch.Tensor:
        """Return the token, an int64 scalar on the device of `logits` (vocabulary).

        A sampled token is a function of the logits, the seed, the index of the prompt and the position in its answer:
        the first in vocabulary order at which the cumulative probability exceeds a uniform random number. This does
        not depend on how tokens of almost equal probability are sorted, which may differ between meshes.
        """
        if self.temperature == 0:
            return logits.argmax()
        probabilities = self.probabilities(logits.cpu())  # (vocabulary)
        digest = blake2b(f"{self.seed}:{prompt}:{position}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        cumulative = probabilities.double().cumsum(0)
        drawn = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
        return torch.searchsorted(cumulative, drawn, right=True).clamp(max=len(cumulative) - 1).to(logits.device)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities to sample from, in float32. logits: (vocabulary)."""
        probabilities = (logits.float() / self.temperature).softmax(0)
        if self.top_p == 1 and self.top_k == 0:
            return probabilities
        ordered, order = probabilities.sort(descending=True, stable=True)
        if self.top_k:
            ordered[self.top_k :] = 0
            ordered /= ordered.sum()
        kept = ordered.double().cumsum(0) - ordered < self.top_p  # the probability of the more likely tokens
        kept[0] = True
        if self.top_k:
            kept[self.top_k :] = False
        probabilities[order[~kept]] = 0
        return probabilities / probabilities.sum()


_GREEDY = Sampling()


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Prompt],
    max_new_tokens: int,
    forward: GenerationForward | None = None,
    stopped: Callable[[], bool] | None = None,
    sampling: Sampling = _GREEDY,
) -> list[str]:
    """Return the continuation of each prompt as text, without special tokens, as `generate_tokens` makes them.

    Returns an empty list if the generation was stopped.
    """
    answers = generate_tokens(model, tokenizer, prompts, max_new_tokens, forward, stopped, sampling)
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in answers]


@torch.no_grad()
def generate_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Prompt],
    max_new_tokens: int,
    forward: GenerationForward | None = None,
    stopped: Callable[[], bool] | None = None,
    sampling: Sampling = _GREEDY,
) -> list[list[int]]:
    """Return the tokens of the continuation of each prompt, without the prompt and the stop token.

    Prompts given as text are formatted with the tokenizer's chat template if it has one. Call it on all ranks with the
    same prompts: they run the same forwards, and rank 0 broadcasts each token, so that all ranks stop at the same step.
    An answer ends with an end-of-text token, with a token that ends answers of the chat template, or where the model's
    context does.

    Args:
        forward: Forward of the mesh; None: call the model itself. Without a cache of keys and values (pp, and tp with
            sequence_parallel), the complete row, padded on the right to `forward.multiple`, is recomputed for each
            token.
        stopped: Called before each token on every rank; must return the same value on all ranks. True ends the
            generation, and an empty list is returned.
        sampling: How tokens are chosen. torch's random states are not used.
    """
    was_training = model.training
    model.eval()
    try:
        # Eager, because compiled layers would be recompiled for every layer and size of the growing cache. That would
        # exhaust the recompile limit, which training after this shares.
        with torch.compiler.set_stance("force_eager"):
            token_lists, stops = [], stop_tokens(model, tokenizer)
            for index, prompt in enumerate(prompts):
                choose = partial(sampling.choose, prompt=index)
                tokens = prompt.tokens if isinstance(prompt, Prompt) else encode_prompt(tokenizer, prompt)
                most = min(max_new_tokens, (context_length(model) or 2**31) - len(tokens))
                answer = stream_tokens(model, stops, tokens, most, choose, forward, stopped)
                token_lists.append(list(answer))
    finally:
        model.train(was_training)
    return [] if stopped is not None and stopped() else token_lists


@torch.no_grad()
def stream_tokens(
    model: PreTrainedModel,
    stops: Container[int],
    tokens: Sequence[int],
    max_new_tokens: int,
    choose: Callable[..., torch.Tensor],
    forward: GenerationForward | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `tokens` as they are generated, without the stop token.

    The model must be in evaluation mode.

    Args:
        stops: `stop_tokens` of the model.
        choose: `Sampling.choose` with the index of the prompt: returns a token from the logits, given its `position`.
        forward, stopped: As for `generate`.
    """
    tokens = list(tokens)
    device = next(model.parameters()).device
    start = len(tokens)
    call = forward.call if forward else model
    multiple, keeps_cache = (forward.multiple, forward.keeps_cache) if forward else (1, True)
    cache = None
    while len(tokens) < start + max_new_tokens and not (stopped is not None and stopped()):
        cached = 0 if cache is None else cache.get_seq_length()
        new = tokens[cached:]
        width = -(-len(new) // multiple) * multiple
        # Attention is causal: no token attends to the padding on its right.
        ids = torch.tensor([new + [0] * (width - len(new))], device=device)  # (1, width)
        positions = torch.arange(cached, cached + width, device=device)[None]  # (1, width)
        last = torch.tensor([len(new) - 1], device=device)
        cache_options = {"past_key_values": cache, "use_cache": True} if keeps_cache else {}
        output = call(input_ids=ids, position_ids=positions, logits_to_keep=last, **cache_options)
        # Without one (Mamba, RWKV, GPT-1), the complete row is recomputed for each token.
        cache = getattr(output, "past_key_values", None) if keeps_cache else None
        token = _next_token(output.logits, partial(choose, position=len(tokens) - start))
        if token in stops:
            break
        tokens.append(token)
        yield token


def _next_token(logits: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return rank 0's choice on every rank. logits: (1, 1, vocabulary)."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    token = choose(logits[0, -1])
    if dist.is_initialized():
        dist.broadcast(token, src=0)
    return int(token)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None = None) -> list[int]:
    """Return the tokens of a user's message with the chat template, or of the plain text if the tokenizer has none.

    At least one token: an empty text is the token that begins a text, or else the one that ends it.

    Args:
        system: System message before it; a tokenizer without a chat template ignores it.
    """
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(prompt)
        if not tokens:
            return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
        # Some tokenizers append an end-of-text token, after which there is nothing to continue.
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens
    before = [] if system is None else [{"role": "system", "content": system}]
    return encode_messages(tokenizer, [*before, {"role": "user", "content": prompt}])


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the tokens of a conversation up to the start of the next answer, rendered with the chat template.

    Raises ConfigError if the template rejects the messages, fails on them, or does not finish.
    """
    conversation = Conversation(f"the prompt {messages[-1]['content']!r:.60}", [dict(message) for message in messages])
    text = ChatTemplate(tokenizer).render(conversation, add_generation_prompt=True).text
    return tokenizer.encode(text, add_special_tokens=False)


def context_length(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a model's input; None if its config does not state it."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end an answer: those of the generation config, and those of the chat template."""
    declared = model.generation_config.eos_token_id
    tokens = declared if isinstance(declared, list) else [declared]
    return {token for token in (*tokens, *ChatTemplate(tokenizer).stop_tokens.values()) if token is not None}
