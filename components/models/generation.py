"""Answer prompts with a model on any mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int,
    pad_multiple: int = 1,
) -> list[str]:
    """Return the greedy continuation of each prompt, without the prompt and special tokens.

    A prompt goes through the tokenizer's chat template where it has one. Call it on all ranks with the same
    prompts: they run the same forwards, and every token is rank 0's, so that no rank stops before another.

    Args:
        pad_multiple: 1: one forward of the prompt, then one per token with a cache of keys and values. More: what the
            mesh divides sequences by (`Mesh.sequence_multiple` under sequence or context parallelism);
            the whole row, padded on the right to this multiple, is computed again for each token.
    """
    was_training = model.training
    model.eval()
    try:
        answers = [_continue(model, tokenizer, prompt, max_new_tokens, pad_multiple) for prompt in prompts]
    finally:
        model.train(was_training)
    return [str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in answers]


def _continue(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int, pad_multiple: int
) -> list[int]:
    device = next(model.parameters()).device
    ends = _end_tokens(model, tokenizer)
    tokens = _encode(tokenizer, prompt)
    start = len(tokens)
    cache = None
    while len(tokens) < start + max_new_tokens:
        seen = 0 if cache is None else cache.get_seq_length()
        new = tokens[seen:]
        width = -(-len(new) // pad_multiple) * pad_multiple
        # Padding on the right is never seen by the tokens before it: attention is causal.
        ids = torch.tensor([new + [tokenizer.pad_token_id] * (width - len(new))], device=device)  # (1, width)
        positions = torch.arange(seen, seen + width, device=device)[None]  # (1, width)
        output = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=pad_multiple == 1)
        cache = output.past_key_values
        token = _likeliest(output.logits, len(new) - 1)
        if token in ends:
            break
        tokens.append(token)
    return tokens[start:]


def _likeliest(logits: torch.Tensor, position: int) -> int:
    """The likeliest token after `position` of the only row; the same on every rank. logits: (1, width, vocabulary)"""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    token = logits[0, position].argmax()
    if dist.is_initialized():
        dist.broadcast(token, src=0)
    return int(token)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    declared = getattr(model.generation_config, "eos_token_id", None)
    ends = declared if isinstance(declared, list) else [declared]
    return {token for token in [*ends, tokenizer.eos_token_id] if token is not None}
