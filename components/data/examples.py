"""From a conversation to token ids, and which of them carry the loss."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from components.config.errors import ConfigError
from components.config.schema.data import IGNORED
from components.data.chat_template import ChatTemplate, Rendering
from components.data.sources.rows import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORED", "Example", "PackedRow", "encode_conversations", "render_example", "trimmed"]


class Example(NamedTuple):
    """One tokenized sample. `labels[i]` is `input_ids[i]` where that token carries loss, else `IGNORED`.

    Labels are aligned with the inputs; the loss shifts them (Hugging Face's convention).
    """

    input_ids: list[int]  # (seq,)
    labels: list[int]  # (seq,)


class PackedRow(NamedTuple):
    """Several samples one after another; the first label of each is `IGNORED`, as in every sample of a `Dataset`."""

    input_ids: list[int]  # (seq,)
    labels: list[int]  # (seq,)
    ends: list[int]  # where each sample ends, (documents,)

    @property
    def examples(self) -> list[Example]:
        """The samples, each by itself."""
        places = zip([0, *self.ends[:-1]], self.ends, strict=True)
        return [Example(self.input_ids[start:end], self.labels[start:end]) for start, end in places]


class _Turn(NamedTuple):
    """One answer of the assistant in context."""

    ids: list[int]  # the conversation up to and with the answer
    spans: list[tuple[int, int]]  # tokens of the answer that carry the loss


class _Draft(NamedTuple):
    """The same as text."""

    prompt: Rendering  # what a model is given before it answers
    through: Rendering  # the conversation up to and with the answer
    is_marked: bool  # whether the template's own blocks say what the answer is


def encode_conversations(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]) -> list[Example]:
    """Tokenize conversations; the loss is on every turn of the assistant but those in `untrained`.

    Text comes from the tokenizer's chat template, which is given messages and tools as they are, or, without one, from
    the contents joined by newlines with the end-of-text token after each answer. Reasoning and tool calls are part of
    a turn as the template writes them. The loss mask is found by rendering, never by searching for markers:

    - A template with {% generation %} blocks marks what the assistant generates; those of a turn are the ones that it
      adds to its prompt.
    - With any other template, a turn starts where the tokens of the conversation with it part from those of the prompt
      that a model would be given (`add_generation_prompt=True`), and ends with its end-of-turn token. A token that
      holds both the last characters of the prompt and the first of the answer counts as answer.

    Where a template writes an answer in the history differently from a last one (it drops the reasoning, or
    ends it with another token), no single sequence shows every turn as a model would produce it: such a
    conversation gives one example per answer. So there may be more examples than conversations.

    Raises ConfigError where a template refuses a conversation, does not end, or cannot be decided in this way, and
    where a tokenizer has neither a chat template nor an end-of-text token.
    """
    renderer = _Renderer(tokenizer)
    drafts = [[renderer.draft(each, answer) for answer in each.trained] for each in conversations]
    turns = renderer.turns([draft for those in drafts for draft in those])
    examples: list[Example] = []
    for those in drafts:
        # Without any answer to train on, an empty sample is left, which the data set drops and counts.
        examples += _assemble([next(turns) for _ in those]) or [Example([], [])]
    return examples


def trimmed(example: Example) -> Example:
    """Cut what follows the last token with loss: under causal attention nothing that counts ever sees it.

    The first position never carries loss, because nothing predicts it. So every example that has a target at
    all ends with one, and the number of labels other than `IGNORED` is the number of losses after the shift.
    """
    labels = [IGNORED, *example.labels[1:]]
    while labels and labels[-1] == IGNORED:
        labels.pop()
    return Example(example.input_ids[: len(labels)], labels)


def render_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Return the text of an example, with the part that carries the loss in [[ ]]."""
    text = ""
    pairs = zip(example.input_ids, example.labels, strict=True)
    for has_loss, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        part = str(tokenizer.decode([token for token, _ in run]))
        text += f"[[{part}]]" if has_loss else part
    return text


class _Renderer:
    """What turns conversations into tokens and spans: a tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.is_plain = not tokenizer.chat_template
        self.ends_texts = False
        """Whether the tokenizer ends every text with the end-of-text token: prompts too, and answers a second time."""
        if self.is_plain:
            self._check_end_of_text()
            self.ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special.update(tokenizer.all_special_ids)

    def draft(self, conversation: Conversation, answer: int) -> _Draft:
        """Return the text of message `answer` in context."""
        prompt = self.template.render(conversation, answer, add_generation_prompt=True)
        through = self.template.render(conversation, answer + 1)
        if self.template.marks_answers(conversation):
            own = through.blocks[len(prompt.blocks) :]
            if not any(start < end for start, end in own):
                raise ConfigError(
                    f"{conversation.where}: the chat template's {{% generation %}} blocks mark nothing of message "
                    f"{answer}, an answer of the assistant; correct the template, or set model.tokenizer to another"
                )
            return _Draft(prompt, Rendering(through.text, own), True)
        if not through.text.startswith(prompt.text):
            # Some templates open the prompt with more than they keep (a <think> that no answer repeats).
            history = self.template.render(conversation, answer)
            if not through.text.startswith(history.text):
                raise ConfigError(
                    f"{conversation.where}: the tokenizer's chat template writes the messages before message {answer} "
                    "differently once that answer follows, so which tokens carry the loss cannot be told; "
                    "set model.tokenizer to one with another chat template"
                )
        return _Draft(prompt, through, False)

    def turns(self, drafts: Sequence[_Draft]) -> Iterator[_Turn]:
        """Tokenize many turns at once, on all cores."""
        marked = [draft for draft in drafts if draft.is_marked]
        others = [draft for draft in drafts if not draft.is_marked]
        by_blocks, by_prompts = self._by_blocks(marked), self._by_prompts(others)
        return iter([next(by_blocks if draft.is_marked else by_prompts) for draft in drafts])

    def _by_blocks(self, drafts: Sequence[_Draft]) -> Iterator[_Turn]:
        """Tokens that hold a character of a block carry the loss."""
        if not drafts:
            return
        texts = [draft.through.text for draft in drafts]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        for draft, ids, offsets in zip(drafts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield _Turn(ids, [_tokens_of(block, offsets) for block in draft.through.blocks if block[0] < block[1]])

    def _by_prompts(self, drafts: Sequence[_Draft]) -> Iterator[_Turn]:
        texts = [rendering.text for draft in drafts for rendering in (draft.prompt, draft.through)]
        ids = iter(self._tokenize(texts))
        for _ in drafts:
            prompt, through = next(ids), next(ids)
            start = _common_prefix(prompt, through)
            yield _Turn(through, [(start, self._end_of_turn(through, start))])

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Tokenize many texts at once. A template writes its own special tokens, plain text has none yet."""
        if not texts:
            return []
        ids = self.tokenizer(texts, add_special_tokens=self.is_plain, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return [each[:-1] for each in ids] if self.is_plain and self.ends_texts else ids

    def _end_of_turn(self, ids: list[int], start: int) -> int:
        """Return the end of an answer: after its last special token, where only whitespace follows that."""
        for position in range(len(ids) - 1, start - 1, -1):
            if ids[position] in self.special:
                after = str(self.tokenizer.decode(ids[position + 1 :]))
                return len(ids) if after.strip() else position + 1
        return len(ids)

    def _check_end_of_text(self) -> None:
        end, end_id = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if end is None or self.tokenizer(end, add_special_tokens=False)["input_ids"] != [end_id]:
            raise ConfigError(
                f"the tokenizer has no chat template and its end-of-text token is {end!r}: nothing could "
                "mark where an answer ends; set model.tokenizer to a tokenizer that has either"
            )


def _assemble(turns: list[_Turn]) -> list[Example]:
    """One example for all turns where every answer stands in the whole conversation as it does at its end."""
    if not turns:
        return []
    last = turns[-1].ids
    ends = [turn.spans[-1][1] for turn in turns]
    if all(turn.ids[:end] == last[:end] for turn, end in zip(turns, ends, strict=True)):
        return [_masked(last, [span for turn in turns for span in turn.spans])]
    return [_masked(*turn) for turn in turns]


def _tokens_of(block: tuple[int, int], offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the first token of a block of characters and the one after its last."""
    start = bisect_right(offsets, block[0], key=lambda offset: offset[1])
    return start, max(start, bisect_left(offsets, block[1], key=lambda offset: offset[0]))


def _masked(ids: list[int], spans: Iterable[tuple[int, int]]) -> Example:
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return trimmed(Example(ids, labels))


def _common_prefix(a: list[int], b: list[int]) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
