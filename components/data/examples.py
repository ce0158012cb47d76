"""From a conversation to token ids, and which of them carry the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from components.config.errors import ConfigError
from components.data.rows import Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a position without loss: the `ignore_index` of PyTorch and Hugging Face."""

_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{{- format | replace('%Y', '2024') | replace('%m', '07') | replace('%d', '26')"
    " | replace('%b', 'Jul') | replace('%B', 'July') -}}"
    "{%- endmacro -%}"
)


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

    prompt: list[int]  # what a model is given before it answers
    through: list[int]  # the same conversation up to and with the answer


def encode_conversations(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]) -> list[Example]:
    """Tokenize conversations; the loss is on every assistant turn, its end-of-turn token included.

    Text comes from the tokenizer's chat template or, without one, from the contents joined by newlines with
    the end-of-text token after each answer. The loss mask is found by comparison, never by searching for
    markers: an answer starts where the tokens of the conversation with it part from those of the prompt that
    a model would be given (`add_generation_prompt=True`), and ends with its end-of-turn token. A token that
    holds both the last characters of the prompt and the first of the answer counts as answer.
    `{% generation %}` blocks are not used: few templates have them, while this is one way for all of them.

    Where a template writes an answer in the history differently from a last one (it drops the reasoning, or
    ends it with another token), no single sequence shows every turn as a model would produce it: such a
    conversation gives one example per answer. So there may be more examples than conversations.

    Raises ConfigError where a template refuses a conversation or cannot be decided in this way, and where a
    tokenizer has neither a chat template nor an end-of-text token.
    """
    renderer = _Renderer(tokenizer)
    texts: list[str] = []
    answers_of: list[int] = []
    for conversation in conversations:
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        answers_of.append(len(answers))
        for answer in answers:
            texts += renderer.turn(conversation, answer)
    ids = iter(renderer.tokenize(texts))
    examples: list[Example] = []
    for count in answers_of:
        turns = [_Turn(next(ids), next(ids)) for _ in range(count)]
        examples += _assemble(turns, renderer)
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
    """A tokenizer's way to write conversations: its chat template, or plain text without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        if self.template and "strftime_now" in self.template:
            # A template that writes today's date would give a run other tokens when it resumes tomorrow.
            self.template = _FIXED_CLOCK + self.template
        self.ends_texts = False
        """Whether the tokenizer ends every text with the end-of-text token: prompts too, and answers a second time."""
        if self.template is None:
            self._check_end_of_text()
            self.ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special.update(tokenizer.all_special_ids)

    def turn(self, conversation: Conversation, answer: int) -> tuple[str, str]:
        """Return the text of the prompt of message `answer`, and the text up to and with that message."""
        messages, where = conversation.messages, conversation.where
        prompt = self._render(messages[:answer], where, add_generation_prompt=True)
        through = self._render(messages[: answer + 1], where, add_generation_prompt=False)
        if not through.startswith(prompt):
            # Some templates open the prompt with more than they keep (a <think> that no answer repeats).
            history = self._render(messages[:answer], where, add_generation_prompt=False)
            if not through.startswith(history):
                raise ConfigError(
                    f"{where}: the tokenizer's chat template writes the messages before message {answer} "
                    "differently once that answer follows, so which tokens carry the loss cannot be told; "
                    "set model.tokenizer to one with another chat template"
                )
        return prompt, through

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Tokenize many texts at once. A template writes its own special tokens, plain text has none yet."""
        if not texts:
            return []
        plain = self.template is None
        ids = self.tokenizer(texts, add_special_tokens=plain, return_attention_mask=False, verbose=False)["input_ids"]
        return [each[:-1] for each in ids] if plain and self.ends_texts else ids

    def end_of_turn(self, ids: list[int], start: int) -> int:
        """Return the end of an answer: after its last special token, where only whitespace follows that."""
        for position in range(len(ids) - 1, start - 1, -1):
            if ids[position] in self.special:
                after = str(self.tokenizer.decode(ids[position + 1 :]))
                return len(ids) if after.strip() else position + 1
        return len(ids)

    def _render(self, messages: list[Message], where: str, add_generation_prompt: bool) -> str:
        if self.template is None:
            end = self.tokenizer.eos_token
            parts = [m["content"] + (end if m["role"] == "assistant" else "") for m in messages]
            return "\n".join(parts) + ("\n" if add_generation_prompt else "")
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages,  # type: ignore[arg-type]
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except TemplateError as error:
            raise ConfigError(f"{where}: the chat template refuses this conversation: {error}") from error
        return str(text)

    def _check_end_of_text(self) -> None:
        end, end_id = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if end is None or self.tokenizer(end, add_special_tokens=False)["input_ids"] != [end_id]:
            raise ConfigError(
                f"the tokenizer has no chat template and its end-of-text token is {end!r}: nothing could "
                "mark where an answer ends; set model.tokenizer to a tokenizer that has either"
            )


def _assemble(turns: list[_Turn], renderer: _Renderer) -> list[Example]:
    """One example for all turns where every answer stands in the whole conversation as it does at its end."""
    spans = []
    for turn in turns:
        start = _common_prefix(turn.prompt, turn.through)
        spans.append((start, renderer.end_of_turn(turn.through, start)))
    if all(turn.through[:end] == turns[-1].through[:end] for turn, (_, end) in zip(turns, spans, strict=True)):
        return [_masked(turns[-1].through, spans)] if turns else []
    return [_masked(turn.through, [span]) for turn, span in zip(turns, spans, strict=True)]


def _masked(ids: list[int], spans: Iterable[tuple[int, int]]) -> Example:
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return trimmed(Example(ids, labels))


def _common_prefix(a: list[int], b: list[int]) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
