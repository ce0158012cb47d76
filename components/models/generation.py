"""Greedy generation from prompts with a model on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components.cpu_limit import running_template

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


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int,
    forward: GenerationForward | None = None,
    stopped: Callable[[], bool] | None = None,
) -> list[str]:
    """Return the greedy continuation of each prompt, without the prompt and special tokens.

    Prompts are formatted with the tokenizer's chat template if it has one. Call it on all ranks with the same prompts:
    they run the same forwards, and rank 0 broadcasts each token, so that all ranks stop at the same step.

    Args:
        forward: Forward of the mesh; None: call the model itself. Without a cache of keys and values, the complete row,
            padded on the right to `forward.multiple`, is recomputed for each token.
        stopped: Called before each token on every rank; must return the same value on all ranks. True ends the
            generation, and an empty list is returned.
    """
    was_training = model.training
    model.eval()
    try:
        # Eager, because compiled layers would be recompiled for every layer and size of the growing cache. That would
        # exhaust the recompile limit, which training after this shares.
        with torch.compiler.set_stance("force_eager"):
            token_lists = [_continue(model, tokenizer, prompt, max_new_tokens, forward, stopped) for prompt in prompts]
    finally:
        model.train(was_training)
    if stopped is not None and stopped():
        return []
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in token_lists]


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    forward: GenerationForward | None,
    stopped: Callable[[], bool] | None,
) -> list[int]:
    device = next(model.parameters()).device
    stop_tokens = _stop_tokens(model, tokenizer)
    tokens = _encode(tokenizer, prompt)
    start = len(tokens)
    call = forward.call if forward else model
    multiple, keeps_cache = (forward.multiple, forward.keeps_cache) if forward else (1, True)
    cache = None
    while len(tokens) < start + max_new_tokens and not (stopped is not None and stopped()):
        cached = 0 if cache is None else cache.get_seq_length()
        new = tokens[cached:]
        width = -(-len(new) // multiple) * multiple
        # Attention is causal: no token attends to the padding on its right.
        ids = torch.tensor([new + [tokenizer.pad_token_id] * (width - len(new))], device=device)  # (1, width)
        positions = torch.arange(cached, cached + width, device=device)[None]  # (1, width)
        last = torch.tensor([len(new) - 1], device=device)
        cache_options = {"past_key_values": cache, "use_cache": True} if keeps_cache else {}
        output = call(input_ids=ids, position_ids=positions, logits_to_keep=last, **cache_options)
        cache = output.past_key_values if keeps_cache else None
        token = _next_token(output.logits)
        if token in stop_tokens:
            break
        tokens.append(token)
    return tokens[start:]


def _next_token(logits: torch.Tensor) -> int:
    """Return rank 0's most likely token on every rank. logits: (1, 1, vocabulary)."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    token = logits[0, -1].argmax()
    if dist.is_initialized():
        dist.broadcast(token, src=0)
    return int(token)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(prompt)
        # Some tokenizers append an end-of-text token, after which there is nothing to continue.
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens
    messages = [{"role": "user", "content": prompt}]
    with running_template(f"the prompt {prompt!r:.60}"):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    declared = model.generation_config.eos_token_id
    tokens = declared if isinstance(declared, list) else [declared]
    return {token for token in [*tokens, tokenizer.eos_token_id] if token is not None}
