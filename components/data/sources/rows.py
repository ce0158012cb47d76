"""From rows of a file or a hub data set to conversations or documents, by the columns that the config names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from components.config.errors import ConfigError
from components.config.schema.data import (
    BadRows,
    ChatDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
)
from components.data.sources.files import Location, Row

Sample = TypeVar("Sample")

_LISTED = 5  # bad rows that are listed; the rest is counted


Message = dict[str, Any]
"""One turn as chat templates take it: `role` (system, user, assistant, tool), `content`, and whatever else it has."""

ASSISTANT = "assistant"
TOOL = "tool"
_OTHER_ROLES = ("developer", "function", "ipython")
"""Roles that some chat templates have, passed on as they are."""
_FLAGS = ("train", "weight")
"""Keys of a message that decide whether it is trained on: Axolotl's and OpenAI's. They are no part of the text."""
_OF_RENDERING = frozenset(
    [
        *("conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    ]
)
"""Arguments of `apply_chat_template` that are not the template's."""


class Conversation(NamedTuple):
    """Messages in order, and what else the chat template is given."""

    where: str
    """Where they come from (`train.jsonl:17`), for error messages."""
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Further variables of the template, such as enable_thinking."""
    untrained: frozenset[int] = frozenset()
    """Messages of the assistant that carry no loss."""

    @property
    def trained(self) -> list[int]:
        """Messages that carry loss."""
        is_answer = (message["role"] == ASSISTANT for message in self.messages)
        return [i for i, answers in enumerate(is_answer) if answers and i not in self.untrained]


class Document(NamedTuple):
    """A text to continue, and where it comes from."""

    where: str
    text: str


class _BadRowError(ValueError):
    """A row that cannot become a conversation; the message says why."""


def train_location(cfg: RowsDataConfig) -> Location:
    """Where the training rows are."""
    return Location("data.path", cfg.path, cfg.split)


def eval_location(cfg: RowsDataConfig) -> Location | None:
    """Where the held-out rows are; None where they are a part of the training rows (`data.eval_fraction`)."""
    if cfg.eval_path is not None:
        return Location("data.eval_path", cfg.eval_path, cfg.eval_split or cfg.split)
    if cfg.eval_split is not None:
        return Location("data.path", cfg.path, cfg.eval_split, is_further_split=True)
    return None


def columns_wanted(cfg: RowsDataConfig) -> dict[str, str]:
    """Return the columns that `cfg` reads, by the config key that names each."""
    match cfg:
        case SftDataConfig():
            columns = {"prompt_column": cfg.prompt_column, "response_column": cfg.response_column}
            return columns if cfg.input_column is None else {**columns, "input_column": cfg.input_column}
        case PreferencesDataConfig():
            names = ("prompt_column", "chosen_column", "rejected_column")
            return dict(zip(names, (cfg.prompt_column, cfg.chosen_column, cfg.rejected_column), strict=True))
        case ChatDataConfig():
            return {"messages_column": cfg.messages_column}
        case TextDataConfig():
            return {"text_column": cfg.text_column}
    raise TypeError(f"no columns are known of {type(cfg).__name__}")


@dataclass(slots=True)
class BadRowsSeen:
    """Rows that could not become samples: how many, and what is wrong with the first."""

    count: int = 0
    listed: list[str] = field(default_factory=list)


def columns_optional(cfg: RowsDataConfig) -> list[str]:
    """Return the columns that `cfg` reads where a source has them."""
    if not isinstance(cfg, ChatDataConfig):
        return []
    return [name for name in (cfg.tools_column, cfg.template_kwargs_column) if name is not None]


def unused_problem(where: str, names: list[str]) -> str:
    """Return why `data.unused_keys=refuse` rejects a source."""
    return (
        f"data.unused_keys=refuse: {where} has keys that neither the chat template nor Meshbook uses: "
        f"{', '.join(names)}; remove them, or set data.unused_keys=report"
    )


def each_conversation(cfg: RowsDataConfig, rows: Iterable[Row], bad: BadRowsSeen) -> Iterator[Conversation]:
    """Yield the conversations of `rows`, one at a time; what could not become one is counted in `bad`.

    Raises ConfigError naming row and column of the first bad rows, after the last row, where they are refused.
    """
    convert: Callable[..., Conversation] = _sft_conversation if isinstance(cfg, SftDataConfig) else _chat_conversation
    return _each(rows, lambda row: convert(cfg, row), cfg.bad_rows, bad)


def each_document(cfg: TextDataConfig, rows: Iterable[Row], bad: BadRowsSeen) -> Iterator[Document]:
    """Yield the documents of `rows`, as `each_conversation` does."""
    column = cfg.text_column
    return _each(rows, lambda row: Document(row.where, _text(row.values, "text_column", column)), cfg.bad_rows, bad)


def _each(
    rows: Iterable[Row], convert: Callable[[Row], Sample], bad_rows: BadRows, bad: BadRowsSeen
) -> Iterator[Sample]:
    for row in rows:
        try:
            sample = convert(row)
        except _BadRowError as error:
            bad.count += 1
            bad.listed += [f"{row.where}: {error}"] if bad.count <= _LISTED else []
            continue
        yield sample
    if bad.count and bad_rows is BadRows.refuse:
        count = "1 row" if bad.count == 1 else f"{bad.count:,} rows"
        listed = bad.listed + ([f"... and {bad.count - _LISTED:,} more"] if bad.count > _LISTED else [])
        raise ConfigError(
            f"data.bad_rows=refuse: {count} cannot become a sample; correct these, or set data.bad_rows=drop "
            "to leave such rows out:" + "".join(f"\n  {each}" for each in listed)
        )


def _sft_conversation(cfg: SftDataConfig, row: Row) -> Conversation:
    values = row.values
    prompt = _text(values, "prompt_column", cfg.prompt_column)
    response = _text(values, "response_column", cfg.response_column)
    if cfg.input_column is not None and values.get(cfg.input_column):
        prompt += "\n\n" + _text(values, "input_column", cfg.input_column)
    messages: list[Message] = []
    if cfg.system_prompt is not None:
        messages.append({"role": "system", "content": cfg.system_prompt})
    messages.append({"role": "user", "content": prompt})
    messages.append({"role": "assistant", "content": response})
    return Conversation(row.where, messages)


def _chat_conversation(cfg: ChatDataConfig, row: Row) -> Conversation:
    column = cfg.messages_column
    turns = row.values.get(column)
    if not isinstance(turns, list):
        raise _BadRowError(f"data.messages_column={column}: holds {_kind(turns)}, not a list of messages")
    messages: list[Message] = []
    untrained = set()
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise _BadRowError(f"message {number} of {column!r} is {_kind(turn)}, not an object")
        try:
            messages.append(_message(cfg, turn))
            is_trained = _is_trained(turn, messages[-1]["role"])
        except _BadRowError as error:
            raise _BadRowError(f"message {number} of {column!r} {error}") from error
        if not is_trained and messages[-1]["role"] == ASSISTANT:
            untrained.add(number - 1)
    if not messages or messages[0]["role"] == ASSISTANT or all(m["role"] != ASSISTANT for m in messages):
        raise _BadRowError(f"{column!r} needs an answer of the role {cfg.assistant_role!r} after another message")
    tools = _decoded(row.values, "tools_column", cfg.tools_column, list) or None  # some templates announce no tools
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise _BadRowError(f"data.tools_column={cfg.tools_column}: holds something else than objects")
    kwargs = _decoded(row.values, "template_kwargs_column", cfg.template_kwargs_column, dict) or {}
    if taken := sorted(_OF_RENDERING & kwargs.keys()):
        raise _BadRowError(
            f"data.template_kwargs_column={cfg.template_kwargs_column}: {taken[0]} is not the template's"
        )
    return Conversation(row.where, messages, tools, kwargs, frozenset(untrained))


def _message(cfg: ChatDataConfig, turn: dict[str, Any]) -> Message:
    """Return a message under the names that chat templates know, with all that it holds but its training flags."""
    roles = {cfg.system_role: "system", cfg.user_role: "user", cfg.assistant_role: ASSISTANT, cfg.tool_role: TOOL}
    roles |= {role: role for role in _OTHER_ROLES if role not in roles}
    given = turn.get(cfg.role_key)
    if not isinstance(given, str) or given not in roles:
        raise _BadRowError(
            f"has the role {given!r} (data.role_key={cfg.role_key}), none of {', '.join(roles)}; set data.user_role, "
            "data.assistant_role, data.system_role or data.tool_role"
        )
    role = roles[given]
    renamed = {cfg.role_key: "role", cfg.content_key: "content"}
    rest = {key: value for key, value in turn.items() if key not in (*renamed, *_FLAGS)}
    for key, name in renamed.items():
        if name in rest:
            raise _BadRowError(f"has both {key!r} and {name!r}; leave one of them out")
    calls = rest.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise _BadRowError(f"has tool_calls that are {_kind(calls)}, not a list of objects")
    message = {"role": role, "content": turn.get(cfg.content_key), **rest}
    try:
        _check_content(message, turn, cfg.content_key)
    except _BadRowError as error:
        raise _BadRowError(f"(role {given}): {error}") from error
    return {key: value for key, value in message.items() if value is not None}


def _check_content(message: Message, turn: dict[str, Any], key: str) -> None:
    """Reject a content that is missing or not text, unless the role or the rest of the message makes up for it."""
    content, role = message["content"], message["role"]
    if role == TOOL and content is not None:
        return  # the result of a tool may be empty, or an object
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise _BadRowError(f"data.content_key={key}: holds the part {part!r:.60}; only text can be trained on")
        content = text_of(content)
    if role == ASSISTANT and message.get("tool_calls") and content in (None, ""):
        return
    _text({key: content} if key in turn else {}, "content_key", key)


def _is_trained(turn: dict[str, Any], role: str) -> bool:
    """Whether a message's flags leave it its loss. Raises _BadRowError where the two or the role contradict."""
    flags = {key: turn[key] for key in _FLAGS if turn.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise _BadRowError(
                f"has {key}={value!r}; must be true, false, 0 or 1: a loss cannot be weighted by message"
            )
        if value and role != ASSISTANT:
            raise _BadRowError(f"has {key}={value!r} and the role {role!r}; only the assistant's messages carry loss")
    if len(set(map(bool, flags.values()))) > 1:
        raise _BadRowError(
            f"has train={turn['train']!r} and weight={turn['weight']!r}, which contradict; leave one out"
        )
    return all(flags.values())


def _decoded(values: dict[str, Any], key: str, name: str | None, kind: type) -> Any:
    """Return a column that holds a list or an object, or JSON text of one; None where a row has none."""
    value = values.get(name) if name is not None else None
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise _BadRowError(f"data.{key}={name}: holds text that is not JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        raise _BadRowError(f"data.{key}={name}: holds {_kind(value)}, not {'a list' if kind is list else 'an object'}")
    return value


def text_of(content: Any) -> str:
    """Return the text of a message's content; of a list that of its parts, of an object its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _text(values: dict[str, Any], key: str, name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        missing = "" if name in values else " (it is not there)"
        raise _BadRowError(f"data.{key}={name}: holds {_kind(value)}, not text{missing}")
    if not value.strip():
        raise _BadRowError(f"data.{key}={name}: is empty")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r:.40}"
