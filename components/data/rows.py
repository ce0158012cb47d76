"""From rows of a file or a hub data set to conversations or documents, by the columns that the config names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, TypeVar

from components.config.errors import ConfigError
from components.config.schema.data import BadRows, ChatDataConfig, RowsDataConfig, SftDataConfig, TextDataConfig
from components.data.files import Place, Row

Sample = TypeVar("Sample")

_TOLD = 5  # bad rows that are listed; the rest is counted


class Message(TypedDict):
    """One turn. Roles are `system`, `user` and `assistant`, as chat templates know them."""

    role: str
    content: str


class Conversation(NamedTuple):
    """Messages in order, and where they come from (`train.jsonl:17`), for error messages."""

    where: str
    messages: list[Message]


class Document(NamedTuple):
    """A text to continue, and where it comes from."""

    where: str
    text: str


class _BadRowError(ValueError):
    """A row that cannot become a conversation; the message says why."""


def training_place(cfg: RowsDataConfig) -> Place:
    """Where the training rows are."""
    return Place("data.path", cfg.path, cfg.split)


def held_out_place(cfg: RowsDataConfig) -> Place | None:
    """Where the held-out rows are; None where they are a part of the training rows (`data.eval_fraction`)."""
    if cfg.eval_path is not None:
        return Place("data.eval_path", cfg.eval_path, cfg.eval_split or cfg.split)
    if cfg.eval_split is not None:
        return Place("data.path", cfg.path, cfg.eval_split, is_part=True)
    return None


def columns_wanted(cfg: RowsDataConfig) -> dict[str, str]:
    """Return the columns that `cfg` reads, by the config key that names each."""
    match cfg:
        case SftDataConfig():
            columns = {"prompt_column": cfg.prompt_column, "response_column": cfg.response_column}
            return columns if cfg.input_column is None else {**columns, "input_column": cfg.input_column}
        case ChatDataConfig():
            return {"messages_column": cfg.messages_column}
        case TextDataConfig():
            return {"text_column": cfg.text_column}
    raise TypeError(f"no columns are known of {type(cfg).__name__}")


@dataclass(slots=True)
class BadRowsSeen:
    """Rows that could not become samples: how many, and what is wrong with the first."""

    count: int = 0
    told: list[str] = field(default_factory=list)


def each_conversation(cfg: RowsDataConfig, rows: Iterable[Row], bad: BadRowsSeen) -> Iterator[Conversation]:
    """Yield the conversations of `rows`, one at a time; what could not become one is counted in `bad`.

    Raises ConfigError naming row and column of the first bad rows, after the last row, where they are refused.
    """
    messages_of: Callable[..., list[Message]] = _sft_messages if isinstance(cfg, SftDataConfig) else _chat_messages
    return _each(rows, lambda row: Conversation(row.where, messages_of(cfg, row.values)), cfg.bad_rows, bad)


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
            bad.told += [f"{row.where}: {error}"] if bad.count <= _TOLD else []
            continue
        yield sample
    if bad.count and bad_rows is BadRows.refuse:
        more = [f"... and {bad.count - _TOLD:,} more such rows"] if bad.count > _TOLD else []
        raise ConfigError(
            [
                *bad.told,
                *more,
                "data.bad_rows=refuse: correct these rows, or set data.bad_rows=drop to leave them out",
            ]
        )


def _sft_messages(cfg: SftDataConfig, values: dict[str, Any]) -> list[Message]:
    prompt = _text(values, "prompt_column", cfg.prompt_column)
    response = _text(values, "response_column", cfg.response_column)
    if cfg.input_column is not None and values.get(cfg.input_column):
        prompt += "\n\n" + _text(values, "input_column", cfg.input_column)
    messages: list[Message] = []
    if cfg.system_prompt is not None:
        messages.append({"role": "system", "content": cfg.system_prompt})
    messages.append({"role": "user", "content": prompt})
    messages.append({"role": "assistant", "content": response})
    return messages


def _chat_messages(cfg: ChatDataConfig, values: dict[str, Any]) -> list[Message]:
    column = cfg.messages_column
    turns = values.get(column)
    if not isinstance(turns, list):
        raise _BadRowError(f"data.messages_column={column}: holds {_kind(turns)}, not a list of messages")
    roles = {cfg.system_role: "system", cfg.user_role: "user", cfg.assistant_role: "assistant"}
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise _BadRowError(f"message {number} of {column!r} is {_kind(turn)}, not an object")
        role = turn.get(cfg.role_key)
        if role not in roles:
            raise _BadRowError(
                f"message {number} of {column!r} has the role {role!r} (data.role_key={cfg.role_key}), none "
                f"of {', '.join(roles)}; set data.user_role, data.assistant_role or data.system_role"
            )
        if turn.get("tool_calls"):
            raise _BadRowError(f"message {number} of {column!r} calls tools, which is not built yet")
        messages.append({"role": roles[role], "content": _text(turn, "content_key", cfg.content_key)})
    if not messages or messages[0]["role"] == "assistant" or all(m["role"] != "assistant" for m in messages):
        raise _BadRowError(f"{column!r} needs an answer of the role {cfg.assistant_role!r} after another message")
    return messages


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
