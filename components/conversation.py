"""Conversations in the format of chat templates. Imports no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Message = dict[str, Any]
"""One message in the format of chat templates: `role` (system, user, assistant, tool), `content`, further keys."""

ASSISTANT = "assistant"
TOOL = "tool"


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


def text_of(content: Any) -> str:
    """Return the content of a message as text: the joined parts of a list, an object as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return json.dumps(content, ensure_ascii=False)
