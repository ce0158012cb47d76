"""Conversations in the format of chat templates. Imports no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from components.protocol.safe_parsing import parse_json

Message = dict[str, Any]
"""One message in the format of chat templates: `role` (system, user, assistant, tool), `content`, further keys."""

ASSISTANT = "assistant"
TOOL = "tool"
_SYSTEM_ROLES = ("system", "developer")


class Conversation(NamedTuple):
    """Messages in order, and the other inputs of the chat template."""

    where: str
    """Origin of the conversation for error messages, such as `train.jsonl:17`."""
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Further template variables, such as enable_thinking."""
    untrained: frozenset[int] = frozenset()
    """Indices of assistant messages without loss."""
    is_desirable: bool | None = None
    """Label of the answer; None: it has none."""

    @property
    def trained(self) -> list[int]:
        """Indices of the assistant messages with loss."""
        is_answer = (message["role"] == ASSISTANT for message in self.messages)
        return [i for i, answers in enumerate(is_answer) if answers and i not in self.untrained]

    @property
    def turns(self) -> list[int]:
        """Indices of the messages that begin a turn: the first after the system messages, and each user message that
        follows one of another role."""
        roles = [message["role"] for message in self.messages]
        first = next((i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES), 0)
        later = (i for i in range(first + 1, len(roles)) if roles[i] == "user" != roles[i - 1])
        return [first, *later]

    def with_last_turn_trained(self) -> Conversation:
        """Return the conversation with a loss only on the turn of its last assistant message."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        start = max(turn for turn in self.turns if turn <= last)
        return self._replace(untrained=self.untrained.union(i for i in self.trained if i < start))

    def from_turn(self, start: int) -> Conversation:
        """Return the system messages at the beginning, the messages from `start` on, and all other inputs."""
        first = self.turns[0]
        untrained = frozenset(i - start + first for i in self.untrained if i >= start)
        return self._replace(messages=[*self.messages[:first], *self.messages[start:]], untrained=untrained)


class Prompt(NamedTuple):
    """Start of a text that a model continues."""

    text: str
    """Last message, or the beginning of a document, for logs."""
    tokens: list[int]
    """All tokens before the answer, with the system message and the tools."""


def text_of(content: Any) -> str:
    """Return the content of a message as text: the joined parts of a list, an object as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return json.dumps(content, ensure_ascii=False)


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the name and arguments of a tool call, which most formats nest under `function`."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call, decoded from JSON text; none are an empty object.

    Raises ValueError for text that is not JSON.
    """
    arguments = function_of(call).get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments) if arguments.strip() else None
    return {} if arguments is None else arguments
