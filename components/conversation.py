"""Conversations in the format of chat templates. Imports no transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from components.protocol.errors import ConfigError, raise_all
from components.protocol.safe_parsing import parse_json

Message = dict[str, Any]
"""One message in the format of chat templates: `role` (system, user, assistant, tool), `content`, further keys."""

ASSISTANT = "assistant"
TOOL = "tool"
_SYSTEM_ROLES = ("system", "developer")
_MOST_PROBLEMS = 10
"""Lines of a file of prompts that an error lists."""


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
        follows one of another role, or the system messages right before it."""
        roles = [message["role"] for message in self.messages]
        first = next((i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES), 0)
        turns = [first]
        for start in (i for i in range(first + 1, len(roles)) if roles[i] == "user" != roles[i - 1]):
            while roles[start - 1] in _SYSTEM_ROLES:
                start -= 1
            turns.append(start)
        return turns

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


def read_prompts(file: str | Path) -> list[str | Conversation]:
    """Return the prompts of a JSONL file: a text for a line with `prompt`, a conversation for one with `messages`.

    Raises ConfigError that lists the first lines with problems.
    """
    key, found, problems = f"answers.prompts={file}", list[str | Conversation](), list[str]()
    try:
        lines = Path(file).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read: {error.strerror}; name a JSONL file of prompts") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_prompt_of(parse_json(line), f"{file}:{number}"))
        except ValueError as error:
            problems.append(f"{key}: line {number}: {error}")
    if not found and not problems:
        problems = [f'{key}: has no prompts; write one per line, such as {{"prompt": "Who are you?"}}']
    raise_all(problems[:_MOST_PROBLEMS])
    return found


def _prompt_of(row: Any, where: str) -> str | Conversation:
    """Return the prompt of a line. Raises ValueError if it has none."""
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError('must be an object with either "prompt" or "messages"')
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise ValueError(f'"prompt" is {row["prompt"]!r:.60}; it must be a text')
        return str(row["prompt"])
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    if not messages or messages[-1]["role"] == ASSISTANT:
        raise ValueError('"messages" must end with a message to answer, not with one of the assistant')
    if tools is not None and not isinstance(tools, list):
        raise ValueError('"tools" must be a list')
    return Conversation(where, messages, tools)


class Prompt(NamedTuple):
    """Start of a text that a model continues."""

    text: str
    """Last message, or the beginning of a document, for logs."""
    tokens: list[int]
    """All tokens before the answer, with the system message and the tools."""
    calls: list[Any] | None = None
    """Tool calls of the answer that follows, as `parse_calls` reads them; None: a prompt without such an answer."""


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


_CALL_FORMS = {
    "<tool_call>": r"<tool_call>(?P<body>.*?)</tool_call>",
    "<function=>": r"(?P<body><function=.*?</function>)",
    "[TOOL_CALLS] list": r"\[TOOL_CALLS\]\s*(?P<body>\[.*\])",
    "[TOOL_CALLS]": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?"
    r"(?P<json>.*?)(?=\[TOOL_CALLS\]|</s>|\Z)",
    "deepseek": "<\uff5ctool\u2581call\u2581begin\uff5c>(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\\w.-]+)"
    "(?:<\uff5ctool\u2581sep\uff5c>|\n```json\n)(?P<json>.*?)(?:\n```)?<\uff5ctool\u2581call\u2581end\uff5c>",
    "to=functions": r"to=functions\.(?P<name>[\w.-]+)[^{]*<\|message\|>(?P<json>.*?)(?:<\|call\|>|\Z)",
    "json": r"\A\s*(?:<\|python_tag\|>)?(?P<body>[\[{].*[\]}])(?:\s|<[^<>]*>)*\Z",
}
"""Forms in which models write tool calls. The last is the whole answer as JSON, of Llama 3."""


def parse_calls(text: str) -> list[list[Any]]:
    """Return the tool calls that a model wrote, each as its form, its function's name and its arguments.

    The name and the arguments of a call that cannot be read are None. XML-like forms write texts and numbers alike:
    what is JSON is a number, a truth value, a list or an object, and the rest is text.
    """
    answer = text.rpartition("</think>")[2]
    for form, pattern in _CALL_FORMS.items():
        if matches := list(re.finditer(pattern, answer, re.DOTALL)):
            return [[form, *call] for match in matches for call in _calls_of(match.groupdict())]
    return []


def same_calls(found: list[list[Any]], expected: list[list[Any]]) -> bool:
    """Return whether two lists of calls, as `parse_calls` returns them, have equal forms, names and JSON arguments."""
    return _same(found, expected)


def reads_calls(parsed: list[list[Any]], calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `parse_calls` has read the tool calls of a message from its text."""
    if [name for _, name, _ in parsed] != [function_of(call).get("name") for call in calls]:
        return False
    pairs = ((arguments, arguments_of(call)) for (_, _, arguments), call in zip(parsed, calls, strict=True))
    return all(
        isinstance(given, dict)
        and found.keys() == given.keys()
        and all(_same(found[key], each) or _same(found[key], _untyped(each)) for key, each in given.items())
        for found, given in pairs
    )


def _calls_of(groups: Mapping[str, str | None]) -> list[tuple[str | None, dict[str, Any] | None]]:
    """Return the names and arguments of the calls in a match of one of the forms."""
    body = (groups.get("body") or "").strip()
    if name := groups.get("name"):
        return [_named(name, groups["json"])]
    if function := re.fullmatch(r"<function=([^<>\n]+)>(.*)</function>", body, re.DOTALL):
        inner = function[2].strip()
        if inner.startswith("{"):
            return [_named(function[1], inner)]
        pairs = re.findall(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", inner, re.DOTALL)
        return [(function[1], {key: _untyped(value) for key, value in pairs})]
    if call := re.fullmatch(r"([\w.-]+)\s*((?:<arg_key>.*</arg_value>)?)", body, re.DOTALL):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", call[2], re.DOTALL)
        return [(call[1], {key: _untyped(value) for key, value in pairs})]
    try:
        value = parse_json(body)
    except ValueError:
        return [(None, None)]
    calls = []
    for each in value if isinstance(value, list) else [value]:
        inner = function_of(each) if isinstance(each, dict) else {}
        calls.append(_named(inner.get("name"), inner.get("arguments", inner.get("parameters"))))
    return calls


def _named(name: Any, arguments: Any) -> tuple[str | None, dict[str, Any] | None]:
    """Return a call whose arguments may be JSON text, or (None, None) if it is none."""
    try:
        found = arguments_of({"arguments": arguments})
    except ValueError:
        found = None
    return (name, found) if isinstance(name, str) and isinstance(found, dict) else (None, None)


def _untyped(value: Any) -> Any:
    """Parse a value from a form of tool calls that writes texts without quotation marks, like other values."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return value


def _same(one: Any, other: Any) -> bool:
    """Return whether two values of JSON are equal: 1 and 1.0 are, and 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
