"""Flash cards in a format of our own: blocks of `Q:` and `A:` lines, separated by empty lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook import data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(tokenizer: PreTrainedTokenizerBase, seq_len: int, split: str) -> Sequence[data.Example]:
    """Return the samples of a split, `train` or `eval`: the cards in SPLIT.txt, with the loss on the answers.

    Args:
        seq_len: Longest sample; Meshbook cuts longer ones, so this function need not.
    """
    file = Path(__file__).with_name(f"{split}.txt")
    conversations = []
    for number, block in enumerate(file.read_text().strip().split("\n\n")):
        question, _, answer = block.removeprefix("Q: ").partition("\nA: ")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        conversations.append(data.Conversation(f"{file.name}, card {number}", messages))
    return data.encode_conversations(tokenizer, conversations)
