"""Keys of messages, tools and template arguments that the chat template does not render."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from components.chat_template import ChatTemplate
from components.config.errors import ConfigError
from components.conversation import ASSISTANT, Conversation, Message, arguments_of, function_of, text_of

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Aliases of one key: transformers fills each from the others."""
_MAX_TRIES = 200
"""Conversations in which a key is tried before it counts as unused."""


ENDLESS = (
    "end without a token at which generation stops, because the chat template writes none after them: the model does "
    "not learn to stop; set model.chat_template to one that writes {{ eos_token }} there"
)
HEADER = "are trained with their header, because the chat template ignores add_generation_prompt"
BOUNDARY = "begin within a token that also holds the end of the prompt; generation ends the prompt before it"


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
        """Answers to which a note applies: `ENDLESS`, `HEADER` or `BOUNDARY`."""

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
