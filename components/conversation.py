"""Conversations in the format of chat templates. Imports no transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from components.config.schema.data import ChatDataConfig
from components.protocol.errors import ConfigError, raise_all
from components.protocol.safe_parsing import parse_json

Message = dict[str, Any]
"""One message in the format of chat templates: `role` (system, user, assistant, tool), `content`, further keys."""

ASSISTANT = "assistant"
TOOL = "tool"
_SYSTEM_ROLES = ("system", "developer")
_OTHER_ROLES = ("developer", "function", "ipython", "observation")
"""Roles of some chat templates, passed through unchanged."""
_FLAGS = ("weight", "train", "training", "train_on_turn", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale",
          "step_loss_mask")  # fmt: skip
"""Message keys of other trainers that set whether the message is trained on; never passed to the template."""
_INVERSE_FLAG = "masked"
"""Message key that sets whether the message is not trained on (torchtune)."""
_UNCLEAR_FLAGS = ("mask", "train_detail", "training_detail", "train_details")
"""Message keys that select parts of a message, or whose meaning differs between trainers."""
FUNCTIONS, SYSTEM = "functions", "system"
"""Columns with tools in OpenAI's form before `tools`, and with the system message."""
_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Usual columns with tools and template variables."""
_RENDER_ARGUMENTS = {
    "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of `apply_chat_template` that are not template variables."""


class BadRowError(ValueError):
    """Reason why a row cannot become a conversation or document."""


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

    def with_system(self, system: str | None) -> Conversation:
        """Return the conversation with a system message, unless it begins with one or `system` is None."""
        if system is None or (self.messages and self.messages[0]["role"] == "system"):
            return self
        messages = [{"role": "system", "content": system}, *self.messages]
        return self._replace(messages=messages, untrained=frozenset(i + 1 for i in self.untrained))

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


def messages_of(
    turns: list[Any], column: str, cfg: ChatDataConfig | None = None
) -> tuple[list[Message], frozenset[int]]:
    """Return messages, and the indices of assistant messages without loss.

    Args:
        cfg: Keys and roles of the messages; None: role and content.
    """
    has_keys, cfg = cfg is not None, cfg or ChatDataConfig(path=column)
    has_function_calls = any(isinstance(turn, dict) and turn.get("function_call") is not None for turn in turns)
    messages, untrained = list[Message](), set[int]()
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRowError(f"message {number} of {column!r} is {kind_of(turn)}, not an object")
        try:
            if has_function_calls:
                turn = _with_tool_calls(cfg, turn)
            messages.append(_message(cfg, turn, has_keys))
            if not _is_trained(turn, messages[-1]["role"]) and messages[-1]["role"] == ASSISTANT:
                untrained.add(number - 1)
        except BadRowError as error:
            raise BadRowError(f"message {number} of {column!r} {error}") from error
    return messages, frozenset(untrained)


def _with_tool_calls(cfg: ChatDataConfig, turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its function_call, OpenAI's old form, as tool_calls, and its result as that of a tool."""
    call = turn.get("function_call")
    if call is None:
        return {**turn, cfg.role_key: cfg.tool_role} if turn.get(cfg.role_key) == "function" else turn
    if turn.get("tool_calls"):
        raise BadRowError("has both 'function_call' and 'tool_calls'; remove one of them")
    if not isinstance(call, dict) or turn.get(cfg.role_key) != cfg.assistant_role:
        raise BadRowError(
            f"has a function_call that is {kind_of(call)} and the role {turn.get(cfg.role_key)!r}; must be an object "
            f"with name and arguments, of {cfg.assistant_role!r}"
        )
    rest = {key: value for key, value in turn.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": call}]}


def _message(cfg: ChatDataConfig, turn: dict[str, Any], has_keys: bool) -> Message:
    """Rename a message's role and keys to those of chat templates; keep its other keys except the training flags."""
    roles = {cfg.system_role: "system", cfg.user_role: "user", cfg.assistant_role: ASSISTANT, cfg.tool_role: TOOL}
    roles |= {role: role for role in _OTHER_ROLES if role not in roles}
    given = turn.get(cfg.role_key)
    if not isinstance(given, str) or given not in roles:
        key = f" (data.role_key={cfg.role_key})" if has_keys else ""
        remedy = "set data.user_role, data.assistant_role, data.system_role or data.tool_role"
        remedy = remedy if has_keys else "correct it"
        raise BadRowError(f"has the role {given!r}{key}, which is not one of {', '.join(roles)}; {remedy}")
    role = roles[given]
    renamed = {cfg.role_key: "role", cfg.content_key: "content"}
    rest = {key: value for key, value in turn.items() if key not in (*renamed, *_FLAGS, _INVERSE_FLAG)}
    if unclear := [key for key in _UNCLEAR_FLAGS if rest.get(key) is not None]:
        raise BadRowError(
            f"has the key {unclear[0]!r}, by which other trainers select what is trained on; Meshbook trains on whole "
            "messages: set weight to 0 or 1 instead"
        )
    for key, name in renamed.items():
        if name in rest:
            raise BadRowError(f"has both {key!r} and {name!r}; remove one of them")
    calls = rest.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadRowError(f"has tool_calls that are {kind_of(calls)}, not a list of objects")
    for index, call in enumerate(calls or ()):
        _check_call(call, f"tool_calls[{index}]")
    message = {"role": role, "content": turn.get(cfg.content_key), **rest}
    try:
        _check_content(message, turn, cfg.content_key)
        _check_unicode(message, "holds")
    except BadRowError as error:
        raise BadRowError(f"(role {given}): {error}") from error
    return {key: value for key, value in message.items() if value is not None}


def _check_call(call: dict[str, Any], key: str) -> None:
    """Require the name of a function, and arguments that are an object or JSON text of one."""
    name = function_of(call).get("name")
    if not isinstance(name, str) or not name:
        raise BadRowError(f"has {key}.function.name={name!r}; must be the name of a function")
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        raise BadRowError(f"has {key}.function.arguments that are not JSON text ({error}); correct the text") from error
    if not isinstance(arguments, dict):
        raise BadRowError(f"has {key}.function.arguments that are {kind_of(arguments)}, not an object")


def _check_content(message: Message, turn: dict[str, Any], key: str) -> None:
    """Reject content that is missing or not text, unless the role or the tool calls of the message allow it."""
    content, role = message["content"], message["role"]
    if role == TOOL and content is not None:
        return  # the result of a tool may be empty, or an object
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise BadRowError(f"data.content_key={key}: holds the part {part!r:.60}; only text is supported")
        content = text_of(content)
    if role == ASSISTANT and message.get("tool_calls") and content in (None, ""):
        return
    text_value({key: content} if key in turn else {}, "content_key", key)


def _is_trained(turn: dict[str, Any], role: str) -> bool:
    """Return whether the flags of a message keep its loss.

    Raises BadRowError if the flags are invalid or contradict each other or the role.
    """
    flags = {key: turn[key] for key in (*_FLAGS, _INVERSE_FLAG) if turn.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise BadRowError(
                f"has {key}={value!r}; must be true, false, 0 or 1, because messages cannot have fractional weights"
            )
        if bool(value) != (key == _INVERSE_FLAG) and role != ASSISTANT:
            raise BadRowError(f"has {key}={value!r} and the role {role!r}; only the assistant's messages have a loss")
    if len({bool(value) != (key == _INVERSE_FLAG) for key, value in flags.items()}) > 1:
        listed = " and ".join(f"{key}={flags[key]!r}" for key in sorted(flags))
        raise BadRowError(f"has {listed}, which contradict each other; remove one")
    return all(bool(value) != (key == _INVERSE_FLAG) for key, value in flags.items())


def _decoded(values: Mapping[str, Any], key: str, name: str | None, kind: type) -> Any:
    """Return the list or object of a column, decoded if it is JSON text, or None if the row has none."""
    value = values.get(name) if name is not None else None
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise BadRowError(f"data.{key}={name}: holds text that is not JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        raise BadRowError(f"data.{key}={name}: holds {kind_of(value)}, not {'a list' if kind is list else 'an object'}")
    _check_unicode(value, f"data.{key}={name}: holds")
    return value


def text_value(values: Mapping[str, Any], key: str, name: str) -> str:
    """Return the text in a column of a row. Raises BadRowError; key: that of `data` which names the column."""
    value = values.get(name)
    if not isinstance(value, str):
        missing = "" if name in values else " (the key is missing)"
        raise BadRowError(f"data.{key}={name}: holds {kind_of(value)}, not text{missing}")
    if not value.strip():
        raise BadRowError(f"data.{key}={name}: is empty")
    _check_unicode(value, f"data.{key}={name}: holds")
    return value


def _check_unicode(value: Any, where: str) -> None:
    """Reject half of a surrogate pair, which JSON can hold but a tokenizer cannot read. Raises BadRowError."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        raise BadRowError(
            f"{where} {half}, one half of a surrogate pair, which is no character; correct the text"
        ) from error


def kind_of(value: Any) -> str:
    """Return the type and the beginning of a value, for messages."""
    return "null" if value is None else f"{type(value).__name__} {value!r:.40}"


def system_of(values: Mapping[str, Any], messages: Sequence[Message] = (), column: str = "") -> str | None:
    """Return the system message in a row's column `system`; None: it has none.

    Raises BadRowError if it is no text, or `messages`, in `column`, begin with another one.
    """
    system = values.get(SYSTEM)
    if not (system.strip() if isinstance(system, str) else system):
        return None
    if not isinstance(system, str):
        raise BadRowError(f"column {SYSTEM!r} holds {kind_of(system)}, not the text of a system message; rename it")
    _check_unicode(system, f"column {SYSTEM!r} holds")
    if messages and messages[0]["role"] == "system" and text_of(messages[0]["content"]) != system:
        raise BadRowError(f"message 1 of {column!r} and column {SYSTEM!r} are different system messages; remove one")
    return system


def template_inputs(
    values: Mapping[str, Any], tools_column: str | None, kwargs_column: str | None
) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Return the tools and the further template variables of a row. Raises BadRowError.

    An empty list of tools becomes None, because some templates render a tools section even for an empty list.
    """
    tools = _decoded(values, "tools_column", tools_column, list) or None
    if tools_column is not None and (functions := values.get(FUNCTIONS)):
        is_list = isinstance(functions, list) and all(isinstance(each, dict) for each in functions)
        if tools is not None or not is_list:
            raise BadRowError(
                f"column {FUNCTIONS!r} (OpenAI's old form of tools) holds {kind_of(functions)}; must be a list of "
                f"objects, in rows without {tools_column!r}"
            )
        tools = [{"type": "function", "function": function} for function in functions]
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError(f"data.tools_column={tools_column}: holds a list with entries other than objects")
    kwargs = _decoded(values, "template_kwargs_column", kwargs_column, dict) or {}
    if reserved := sorted(_RENDER_ARGUMENTS & kwargs.keys()):
        raise BadRowError(
            f"data.template_kwargs_column={kwargs_column}: {reserved[0]} is an argument of apply_chat_template, not a "
            "template variable; remove it"
        )
    return tools, kwargs


def prompt_in(
    values: Mapping[str, Any], column: str, where: str, columns: tuple[str | None, str | None] = _TEMPLATE_COLUMNS
) -> str | Conversation:
    """Return the prompt in a column of a row: a text, or a conversation that ends with the message to answer.

    A text becomes a conversation if the row has a system message, tools or template variables; `columns`: those of the
    latter two. Raises BadRowError.
    """
    others = {name: value for name, value in values.items() if name != column}
    content = values.get(column)
    if isinstance(content, list):
        messages, _ = messages_of(content, column)
        if not messages or messages[-1]["role"] == ASSISTANT:
            found = "not with one of the assistant" if messages else "but it is empty"
            raise BadRowError(f"{column!r} must end with a message to answer, {found}")
    else:
        messages = [{"role": "user", "content": text_value(values, "prompt_column", column)}]
    system, (tools, kwargs) = system_of(others, messages, column), template_inputs(others, *columns)
    if isinstance(content, str) and system is None and tools is None and not kwargs:
        return content
    return Conversation(where, messages, tools, kwargs).with_system(system)


def read_prompts(file: str | Path) -> tuple[list[str | Conversation], list[str]]:
    """Return the prompts of a JSONL file, and the sorted keys that are not used.

    A line has `prompt` or `messages`, and perhaps a system message, tools and template variables, as `prompt_in` reads
    them.

    Raises ConfigError that lists the first lines with problems.
    """
    key, found, problems, unused = f"answers.prompts={file}", list[str | Conversation](), list[str](), set[str]()
    try:
        lines = Path(file).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read: {error.strerror}; name a JSONL file of prompts") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt, others = _prompt_of(parse_json(line), f"{file}:{number}")
            found.append(prompt)
            unused |= others
        except ValueError as error:
            # A line has no columns that keys of `data` name.
            problems.append(f"{key}: line {number}: " + re.sub(r"data\.\w+=(\w+): ", r'"\1" ', str(error)))
    if not found and not problems:
        problems = [f'{key}: has no prompts; write one per line, such as {{"prompt": "Who are you?"}}']
    raise_all(problems[:10])
    return found, sorted(unused)


def _prompt_of(row: Any, where: str) -> tuple[str | Conversation, set[str]]:
    """Return the prompt of a line, and the keys that are not used. Raises ValueError if it has none."""
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError('must be an object with either "prompt" or "messages"')
    column, kind = ("prompt", str) if "prompt" in row else ("messages", list)
    if not isinstance(row[column], kind):
        raise ValueError(f'"{column}" is {row[column]!r:.60}; it must be a {"text" if kind is str else "list"}')
    return prompt_in(row, column, where), row.keys() - {column, FUNCTIONS, SYSTEM, *_TEMPLATE_COLUMNS}


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


def reads_calls(parsed: list[list[Any]], calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `parse_calls` has read the tool calls of a message from its text."""
    if [name for _, name, _ in parsed] != [function_of(call).get("name") for call in calls]:
        return False
    pairs = ((arguments, arguments_of(call)) for (_, _, arguments), call in zip(parsed, calls, strict=True))
    return all(
        isinstance(given, dict)
        and found.keys() == given.keys()
        and all(same_json(found[key], each) or same_json(found[key], _untyped(each)) for key, each in given.items())
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


def same_json(one: Any, other: Any) -> bool:
    """Return whether two values of JSON are equal: 1 and 1.0 are, and 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
