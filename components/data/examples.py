"""Conversations to token ids and labels, with the loss mask on the assistant's turns; keys that are not rendered."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from components.chat_template import ChatTemplate, Rendering, TemplateLimitError
from components.config.schema.data import IGNORED
from components.conversation import ASSISTANT, Conversation, Message, arguments_of, function_of, text_of
from components.data.sources.rows import BadRowReport
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORED",
    "Example",
    "PackedRow",
    "encode_conversations",
    "record_bad",
    "render_example",
    "trimmed",
]
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Aliases of one key: transformers fills each from the others."""
_MAX_TRIES = 200
"""Conversations in which a key is tried before it counts as unused."""
_ENDLESS = (
    "end without a token at which generation stops, because the chat template writes none after them: the model does "
    "not learn to stop; set model.chat_template to one that writes {{ eos_token }} there"
)
_HEADER = "are trained with their header, because the chat template ignores add_generation_prompt"
_BOUNDARY = "begin within a token that also holds the end of the prompt; generation ends the prompt before it"


class Example(NamedTuple):
    """One tokenized sample. `labels[i]` is `input_ids[i]` if the loss is computed on that token, else `IGNORED`.

    Labels are aligned with the inputs and shifted later, by `Batch.from_labels` (Hugging Face's convention).
    """

    input_ids: list[int]  # (seq,)
    labels: list[int]  # (seq,)


REJECTED = Example([], [])
"""Sample of a record that could not be tokenized; compared by identity."""


class PackedRow(NamedTuple):
    """Several concatenated samples (documents); the first label of each is `IGNORED`, as in any `Dataset` sample."""

    input_ids: list[int]  # (seq,)
    labels: list[int]  # (seq,)
    ends: list[int]  # exclusive end of each sample, (documents,)
    next_label: int = IGNORED  # label of the token after the row: the target at the row's last token

    @property
    def examples(self) -> list[Example]:
        """The samples of the row, unpacked."""
        bounds = zip([0, *self.ends[:-1]], self.ends, strict=True)
        return [Example(self.input_ids[start:end], self.labels[start:end]) for start, end in bounds]


class _Turn(NamedTuple):
    """One assistant turn, tokenized with the conversation before it."""

    ids: list[int]  # the conversation up to and including the turn
    spans: list[tuple[int, int]]  # token ranges of the turn that contribute to the loss


class _Draft(NamedTuple):
    """One assistant turn as text, before tokenization."""

    prompt: Rendering  # the generation prompt: the conversation before the turn
    through: Rendering  # the conversation up to and including the turn
    is_marked: bool  # whether {% generation %} blocks delimit the turn


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    one_sample_each: bool = False,
    usage: KeyUsage | None = None,
    bad: BadRowReport | None = None,
    newest: NewestTurns | None = None,
) -> list[Example]:
    """Tokenize conversations, with the loss on every assistant turn except those in `untrained`.

    The text is that of `ChatTemplate.render`. Without a template, message contents are joined by newlines, with the
    end-of-text token after each answer. Reasoning and tool calls belong to a turn as the template renders them. The
    loss mask comes from rendering, not from searching for marker strings:

    - A template with {% generation %} blocks marks the generated text. The blocks of a turn are those that rendering
      it adds to its prompt.
    - With any other template, a turn starts at the first token that differs from the generation prompt
      (`add_generation_prompt=True`) and ends with a stop token. A token that spans the end of the prompt and the start
      of the answer counts as answer.

    A turn without a stop token gets the one with which the template begins the next message (`ChatTemplate.with_end`).

    Some templates render an earlier answer differently from the last one (they drop its reasoning, or end it with
    another token). No single sequence then contains every turn as the model would generate it, so such a conversation
    becomes one example per answer: there may be more examples than conversations, unless `one_sample_each` rejects it.
    `usage` records keys that the template does not use, and answers that it renders only in part. `newest` leaves out
    the oldest turns of examples that are too long, of each on its own.

    Raises ConfigError if a template rejects a conversation, exceeds its time limit or leaves the loss mask ambiguous,
    or if a tokenizer has neither a chat template nor an end-of-text token. With `bad`, a conversation becomes the
    sample `REJECTED` and is recorded there, unless the template exceeded the time limit: it may do so on all of them.
    """
    groups = _encode(_Renderer(tokenizer, usage), conversations, one_sample_each, bad)
    if newest is not None:
        groups = newest.apply(_Renderer(tokenizer), conversations, groups)
    # A conversation without a trained answer becomes an empty sample, which the dataset drops and counts.
    return [example for group in groups for example in group or [Example([], [])]]


def _encode(
    renderer: _Renderer, conversations: Sequence[Conversation], one_sample_each: bool, bad: BadRowReport | None
) -> list[list[Example]]:
    """Return the examples of each conversation; none if it has no trained answer, `REJECTED` if it is a bad row."""
    drafts: list[list[_Draft] | None] = []
    for each in conversations:
        try:
            drafts.append([renderer.draft(each, answer) for answer in each.trained])
            if renderer.usage is not None:
                renderer.usage.observe(each)
        except ConfigError as error:
            record_bad(error, each.where, bad)
            drafts.append(None)
    turns = renderer.turns([draft for group in drafts for draft in group or ()])
    examples: list[list[Example]] = []
    for conversation, group in zip(conversations, drafts, strict=True):
        samples = _assemble([next(turns) for _ in group or ()])
        if one_sample_each and len(samples) > 1:
            problem = (
                f"{conversation.where}: the chat template renders an earlier turn of the answer differently from its "
                "last turn, so that no single sample contains the answer; use answers of one turn, or set "
                "model.chat_template to another one"
            )
            record_bad(ConfigError(problem), conversation.where, bad)
            group = None
        examples.append([REJECTED] if group is None else samples)
    return examples


@dataclass(slots=True)
class NewestTurns:
    """Limit to which examples are cut by leaving out their oldest turns."""

    seq_len: int
    """Maximum length in tokens."""
    count: int = 0
    """Examples cut so far."""

    def apply(
        self, renderer: _Renderer, conversations: Sequence[Conversation], groups: list[list[Example]]
    ) -> list[list[Example]]:
        """Replace the examples of conversations that are too long by those without the oldest turns.

        A bisection finds the most turns that fit, with all conversations tokenized together; it leaves out starts at
        which the template rejects the rest. If the newest turn is too long, the example remains as it is.
        """
        found = {(row, index): [each] for row, group in enumerate(groups) for index, each in enumerate(group)}
        searches: dict[tuple[int, int], tuple[Conversation, list[int]]] = {}  # with the turns that may come first
        for (row, index), (sample,) in found.items():
            if len(sample.input_ids) > self.seq_len:
                own = conversations[row]
                # Several examples of a conversation have the loss of one answer each.
                answers = own.trained[index : index + 1] if len(groups[row]) > 1 else own.trained
                own = own._replace(untrained=own.untrained.union(own.trained) - set(answers))
                searches[row, index] = (own, [turn for turn in own.turns[1:] if turn < answers[-1]])
        fitting: dict[tuple[int, int], list[Example]] = {}
        while searches := {key: search for key, search in searches.items() if search[1]}:
            cut = [own.from_turn(starts[(len(starts) - 1) // 2]) for own, starts in searches.values()]
            for (key, (own, starts)), samples in zip(
                list(searches.items()), _encode(renderer, cut, False, BadRowReport()), strict=True
            ):
                middle = (len(starts) - 1) // 2
                if any(each is REJECTED for each in samples):
                    searches[key] = (own, starts[:middle] + starts[middle + 1 :])
                elif all(len(each.input_ids) <= self.seq_len for each in samples):
                    fitting[key] = samples
                    searches[key] = (own, starts[:middle])
                else:
                    searches[key] = (own, starts[middle + 1 :])
        self.count += len(fitting)
        found |= fitting
        return [[each for index in range(len(group)) for each in found[row, index]] for row, group in enumerate(groups)]


def record_bad(error: ConfigError, where: str, bad: BadRowReport | None) -> None:
    """Record a conversation that cannot become a sample; raise the error without `bad`, or at a template's limit."""
    if bad is None or isinstance(error, TemplateLimitError):
        raise error
    bad.add({where: error.problems[0].removeprefix(f"{where}: ")})


def trimmed(example: Example) -> Example:
    """Cut an example after its last target: under causal attention, later tokens do not affect the loss.

    The first label is always `IGNORED`, because no position predicts the first token. Every non-empty example
    therefore ends with a target, and its number of labels other than `IGNORED` is its number of targets after the
    shift.
    """
    labels = [IGNORED, *example.labels[1:]]
    while labels and labels[-1] == IGNORED:
        labels.pop()
    return Example(example.input_ids[: len(labels)], labels)


def render_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Return the text of an example, with the spans that contribute to the loss in [[ ]]."""
    text = ""
    pairs = zip(example.input_ids, example.labels, strict=True)
    for has_loss, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        part = str(tokenizer.decode([token for token, _ in run]))
        text += f"[[{part}]]" if has_loss else part
    return text


class _Renderer:
    """Renderer and tokenizer of conversations: a tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, usage: KeyUsage | None = None) -> None:
        self.tokenizer = tokenizer
        self.usage = usage
        self.template = ChatTemplate(tokenizer)
        self.template.source(None)  # rejects a tokenizer without a default template, of which no row is bad
        self.is_plain = not tokenizer.chat_template
        self.ends_texts = False
        """Whether the tokenizer appends the end-of-text token to every text, which would end prompts too and answers
        twice."""
        if self.is_plain:
            self._check_end_of_text()
            self.ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special.update(tokenizer.all_special_ids)
        self.stops = set(self.template.stop_tokens.values())
        self.ignores_prompt: bool | None = None
        """Whether the chat template ignores add_generation_prompt; None: unknown."""

    def draft(self, conversation: Conversation, answer: int) -> _Draft:
        """Render message `answer` in context. Raises ConfigError if its extent cannot be determined."""
        prompt = self.template.render(conversation, answer, add_generation_prompt=True)
        through = self.template.render(conversation, answer + 1)
        if self.usage is not None:
            self.usage.observe_answer(conversation, answer, through.text)
        is_marked = self.template.marks_answers(conversation)
        if is_marked:
            through = Rendering(
                through.text, [block for block in through.blocks[len(prompt.blocks) :] if block[0] < block[1]]
            )
            if not through.blocks:
                raise ConfigError(
                    f"{conversation.where}: the chat template's {{% generation %}} blocks mark no part of message "
                    f"{answer}, an assistant turn; correct the template, or set model.chat_template to another one"
                )
        elif not through.text.startswith(prompt.text):
            # Some templates add text to the generation prompt that a finished answer omits (such as <think>).
            history = self.template.render(conversation, answer)
            if not through.text.startswith(history.text):
                raise ConfigError(
                    f"{conversation.where}: the tokenizer's chat template renders the messages before message {answer} "
                    "differently once that answer follows, so the loss mask is ambiguous; "
                    "set model.chat_template to another one"
                )
        ended = self.template.with_end(conversation, answer, through)
        if self.usage is not None:
            self.usage.counts[_ENDLESS] += ended is None
            self.usage.counts[_HEADER] += not is_marked and self._trains_header(conversation, answer, prompt, through)
        return _Draft(prompt, ended or through, is_marked)

    def _trains_header(self, conversation: Conversation, answer: int, prompt: Rendering, through: Rendering) -> bool:
        """Return whether the targets begin with the header of the answer, which the generation prompt lacks."""
        content = text_of(conversation.messages[answer].get("content")).strip()
        before, found, _ = through.text[len(prompt.text) :].partition(content or "\0")
        if not found or not any(map(str.isalnum, before)):
            return False
        if self.ignores_prompt is None:
            self.ignores_prompt = self.template.render(conversation, answer).text == prompt.text
        return self.ignores_prompt

    def turns(self, drafts: Sequence[_Draft]) -> Iterator[_Turn]:
        """Tokenize turns in two batches, which a fast tokenizer spreads over all cores."""
        marked = [draft for draft in drafts if draft.is_marked]
        others = [draft for draft in drafts if not draft.is_marked]
        from_blocks, from_prompts = self._turns_from_blocks(marked), self._turns_from_prompts(others)
        return iter([next(from_blocks if draft.is_marked else from_prompts) for draft in drafts])

    def _turns_from_blocks(self, drafts: Sequence[_Draft]) -> Iterator[_Turn]:
        """Tokenize turns and put the loss on every token that overlaps a {% generation %} block."""
        if not drafts:
            return
        texts = [draft.through.text for draft in drafts]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        for draft, ids, offsets in zip(drafts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield _Turn(ids, [_tokens_of(block, offsets) for block in draft.through.blocks])

    def _turns_from_prompts(self, drafts: Sequence[_Draft]) -> Iterator[_Turn]:
        """Tokenize turns and put the loss on the tokens after the common prefix with their prompt."""
        texts = [rendering.text for draft in drafts for rendering in (draft.prompt, draft.through)]
        ids = iter(self._tokenize(texts))
        for draft in drafts:
            prompt, through = next(ids), next(ids)
            start = _common_prefix(prompt, through)
            if self.usage is not None and draft.through.text.startswith(draft.prompt.text):
                self.usage.counts[_BOUNDARY] += start < len(prompt)
            yield _Turn(through, [(start, self._end_of_turn(through, start))])

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Tokenize a batch of texts, adding special tokens only to plain text: templates render theirs."""
        if not texts:
            return []
        ids = self.tokenizer(texts, add_special_tokens=self.is_plain, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return [each[:-1] for each in ids] if self.is_plain and self.ends_texts else ids

    def _end_of_turn(self, ids: list[int], start: int) -> int:
        """Return the exclusive end of an answer: after the first stop token of the special tokens that end it.

        Without a stop token: after its last special token. Only whitespace may be between and after them.
        """
        end = None
        for position in range(len(ids) - 1, start - 1, -1):
            token = ids[position]
            if token in self.stops or (end is None and token in self.special):
                end = position + 1
            elif token not in self.special and str(self.tokenizer.decode([token])).strip():
                break
        return len(ids) if end is None else end

    def _check_end_of_text(self) -> None:
        end, end_id = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if end is None or self.tokenizer(end, add_special_tokens=False)["input_ids"] != [end_id]:
            raise ConfigError(
                f"the tokenizer has no chat template and its end-of-text token is {end!r}, so the end of an answer "
                "cannot be marked; set model.chat_template, or model.tokenizer to a tokenizer that has either"
            )


def _assemble(turns: list[_Turn]) -> list[Example]:
    """Merge turns into one example if every turn is a prefix of the full conversation, else return one for each."""
    if not turns:
        return []
    last = turns[-1].ids
    ends = [turn.spans[-1][1] for turn in turns]
    if all(turn.ids[:end] == last[:end] for turn, end in zip(turns, ends, strict=True)):
        return [_masked(last, [span for turn in turns for span in turn.spans])]
    return [_masked(*turn) for turn in turns]


def _tokens_of(block: tuple[int, int], offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the token range [start, end) that overlaps a character range."""
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


class KeyUsage:
    """Detector of keys (of messages, tools and template arguments) that do not change the rendered text.

    Each key is left out of the first conversations that have it; it is unused if that never changes the text.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tried: Counter[str] = Counter()
        self._used: set[str] = set()
        self._shortened: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Answers to which a note applies: `_ENDLESS`, `_HEADER` or `_BOUNDARY`."""

    @property
    def notes(self) -> list[str]:
        """Notes with the number of answers that each applies to."""
        return [f"{number:,} answers {note}" for note, number in sorted(self.counts.items()) if number]

    @property
    def unused(self) -> list[str]:
        """Sorted names, with roles, of the keys without an effect so far, and of contents rendered only in part."""
        keys = self._tried.keys() - self._used
        return sorted(keys | {f"part of {name}" for name in self._shortened - keys})

    def observe_answer(self, conversation: Conversation, answer: int, through: str) -> None:
        """Check that `through`, which ends with the turn of message `answer`, contains all of its content and calls.

        Templates may cut the reasoning that is written into an answer, or render one of several calls. Whitespace and
        other changed characters (escaping) do not count: the letters and digits must occur in the turn, in order.
        """
        message = conversation.messages[answer]
        calls = [[function_of(call).get("name"), arguments_of(call)] for call in message.get("tool_calls") or ()]
        texts = {
            _name("content", message): [text_of(message.get("content")).strip()],
            _name("tool_calls", message): list(_texts_in(calls)),
        }
        doubtful = {
            name: [text for text in each if text not in through]
            for name, each in texts.items()
            if name not in self._shortened
        }
        if not any(doubtful.values()):
            return
        try:
            history = self._template.render(conversation, answer).text
        except ConfigError:  # it renders these messages only with a generation prompt
            return
        for name, each in doubtful.items():
            for text in each:
                turn = iter(through.removeprefix(history))
                if not all(character in turn for character in text if character.isalnum()):
                    self._shortened.add(name)

    def observe(self, conversation: Conversation) -> None:
        """Try leaving out each key of a conversation that is not yet known to be used."""
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        answers = answers or [len(conversation.messages) - 1]  # a labeled conversation may have no answer
        for index, message in enumerate(conversation.messages[: answers[-1] + 1]):
            # Render up to the next answer, because templates may drop keys (reasoning) from earlier messages.
            stop = 1 + next(answer for answer in answers if answer >= index)
            for key, value in message.items():
                if key == "role" or value in (None, "", [], {}):
                    continue
                removed = _REASONING if key in _REASONING else (key,)
                messages = list(conversation.messages)
                messages[index] = {name: kept for name, kept in message.items() if name not in removed}
                self._try(_name(key, message), conversation, conversation._replace(messages=messages), stop)
        stop = answers[-1] + 1
        if conversation.tools is not None:
            self._try("tools", conversation, conversation._replace(tools=None), stop)
        for key in conversation.template_kwargs:
            kwargs = {name: value for name, value in conversation.template_kwargs.items() if name != key}
            self._try(f"template argument {key}", conversation, conversation._replace(template_kwargs=kwargs), stop)

    def _try(self, name: str, conversation: Conversation, without: Conversation, stop: int) -> None:
        if name in self._used or self._tried[name] >= _MAX_TRIES:
            return
        self._tried[name] += 1
        try:
            expected = self._template.render(conversation, stop)
        except ConfigError:  # it renders the messages up to another one, or only without a generation prompt
            return
        try:
            is_used = self._template.render(without, stop) != expected
        except ConfigError:  # the template requires the key
            is_used = True
        if is_used:
            self._used.add(name)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts and whole numbers in a value of JSON, without texts that templates may escape (\\u00e9)."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(entry)
    elif isinstance(value, str | int) and not isinstance(value, bool) and str(value).isascii():
        yield str(value)


def _name(key: str, message: Message) -> str:
    shape = " as a list" if isinstance(message.get(key), list) and key == "content" else ""
    suffix = " with tool_calls" if message.get("tool_calls") and key != "tool_calls" else ""
    return f"{key}{shape} (role {message['role']}{suffix})"
