"""Answer prompts with a model on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components.cpu_limit import running_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class WholeRowForward(Protocol):
    """How a mesh computes whole rows."""

    @property
    def call(self) -> Callable[..., Any]: ...
    @property
    def multiple(self) -> int: ...
    @property
    def keeps_cache(self) -> bool: ...


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int,
    forward: WholeRowForward | None = None,
    stopped: Callable[[], bool] | None = None,
) -> list[str]:
    """Return the greedy continuation of each prompt, without the prompt and special tokens.

    A prompt goes through the tokenizer's chat template where it has one. Call it on all ranks with the same
    prompts: they run the same forwards, and every token is rank 0's, so that no rank stops before another.

    Args:
        forward: How a mesh computes whole rows; None: the model does it itself. Where no cache of keys and values can
            be kept, the whole row, padded on the right to `forward.multiple`, is computed again for each token.
        stopped: Called before each token on every rank, returns the same on all of them: True ends the generation, and
            no answers are returned.
    """
    was_training = model.training
    model.eval()
    try:
        # Compiled layers are not used: they would be compiled anew for every layer and state of a growing cache, and
        # after eight times refuse, be it in the training that follows.
        with torch.compiler.set_stance("force_eager"):
            answers = [_continue(model, tokenizer, prompt, max_new_tokens, forward, stopped) for prompt in prompts]
    finally:
        model.train(was_training)
    if stopped is not None and stopped():
        return []
    return [str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in answers]


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    forward: WholeRowForward | None,
    stopped: Callable[[], bool] | None,
) -> list[int]:
    device = next(model.parameters()).device
    ends = _end_tokens(model, tokenizer)
    tokens = _encode(tokenizer, prompt)
    start = len(tokens)
    call = forward.call if forward else model
    multiple, keeps_cache = (forward.multiple, forward.keeps_cache) if forward else (1, True)
    cache = None
    while len(tokens) < start + max_new_tokens and not (stopped is not None and stopped()):
        seen = 0 if cache is None else cache.get_seq_length()
        new = tokens[seen:]
        width = -(-len(new) // multiple) * multiple
        # Padding on the right is never seen by the tokens before it: attention is causal.
        ids = torch.tensor([new + [tokenizer.pad_token_id] * (width - len(new))], device=device)  # (1, width)
        positions = torch.arange(seen, seen + width, device=device)[None]  # (1, width)
        last = torch.tensor([len(new) - 1], device=device)
        cached = {"past_key_values": cache, "use_cache": True} if keeps_cache else {}
        output = call(input_ids=ids, position_ids=positions, logits_to_keep=last, **cached)
        cache = output.past_key_values if keeps_cache else None
        token = _likeliest(output.logits)
        if token in ends:
            break
        tokens.append(token)
    return tokens[start:]


def _likeliest(logits: torch.Tensor) -> int:
    """The likeliest token of the only position; the same on every rank. logits: (1, 1, vocabulary)"""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    token = logits[0, -1].argmax()
    if dist.is_initialized():
        dist.broadcast(token, src=0)
    return int(token)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(prompt)
        # Some tokenizers end every text: behind that end there is nothing to continue.
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens
    messages = [{"role": "user", "content": prompt}]
    with running_template(f"the prompt {prompt!r:.60}"):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    declared = model.generation_config.eos_token_id
    ends = declared if isinstance(declared, list) else [declared]
    return {token for token in [*ends, tokenizer.eos_token_id] if token is not None}
