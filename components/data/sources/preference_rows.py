"""Conversion of rows of preference data: pairs of answers to one prompt, or labeled answers.

The columns and forms of the usual hub datasets need no options: prompts and answers are texts or lists of messages,
answers may be whole conversations, also as one text ("Human: ... Assistant: ..."), and a column may hold the system
message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.config.schema.checks import field_values
from components.config.schema.data import PreferencesDataConfig
from components.data.sources.files import Row, check_columns
from components.data.sources.rows import (
    ASSISTANT,
    BadRowError,
    BadRowReport,
    Conversation,
    Message,
    columns_wanted,
    each_row,
    kind_of,
    messages_of,
    number_of,
    text_value,
)
from components.protocol.errors import ConfigError

_USUAL_COLUMNS = {
    "prompt_column": ("prompt", "question", "instruction", "input"),
    "system_column": ("system",),
    "chosen_column": ("chosen", "chosen_response"),
    "rejected_column": ("rejected", "rejected_response"),
    "completion_column": ("completion", "response"),
}
"""Names of each column in hub datasets; the first that exists is read if its key is null."""
_NOT_REQUIRED = ("prompt_column", "system_column")
_ASKING = ("user", "system")
"""Roles of messages that belong to a prompt."""
COMPARED = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys in which the messages that two conversations share are equal; others are metadata, such as a rating."""
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": ASSISTANT}


@dataclass(kw_only=True, slots=True)
class AnswerConfig(PreferencesDataConfig):
    """Preference data of which the answers in one column are read."""

    answer_key: str
    """Key of that column: chosen_column, rejected_column or completion_column."""
    source_columns: list[str] = field(default_factory=list)
    """All columns of the source, for error messages."""
    is_scored: bool = False
    """Whether a score head reads the last token of the answers."""


def answer_configs(cfg: PreferencesDataConfig, columns: Sequence[str], where: str) -> list[AnswerConfig]:
    """Return the config of the chosen and of the rejected answers, or that of the labeled answers.

    Columns whose key is null are set to those found among `columns`, the columns of the source at `where`.

    Raises ConfigError with the columns of the source if a column is missing.
    """
    problems = check_columns(columns_wanted(cfg), columns, where)
    free = [column for column in columns if column not in columns_wanted(cfg).values()]
    values = field_values(cfg)
    found: dict[str, str | None] = {}
    for key in cfg.column_keys:
        names = _USUAL_COLUMNS.get(key, ())
        if values[key] is not None:
            continue
        found[key] = next((name for name in names if name in free), None)
        if found[key] is None and key not in _NOT_REQUIRED:
            problems.append(
                f"data.{key}=null: {where} has no column {' or '.join(names)}, it has {', '.join(columns)}; set "
                f"data.{key} to the column with these answers{_other_form(cfg, columns)}"
            )
    if problems:
        raise ConfigError(problems)
    keys = ("chosen_column", "rejected_column") if cfg.label_column is None else ("completion_column",)
    values |= found
    values["pack"] = False  # pairs are packed, not answers
    return [AnswerConfig(answer_key=key, source_columns=list(columns), **values) for key in keys]


def _other_form(cfg: PreferencesDataConfig, columns: Sequence[str]) -> str:
    """Return a hint if the columns are those of labeled answers instead of pairs, or the other way around."""
    if cfg.label_column is None:
        return ", or objective=kto for rows of one labeled answer" if "label" in columns else ""
    has_pairs = any(name in columns for name in _USUAL_COLUMNS["chosen_column"])
    return ", or another objective than kto for pairs of answers" if has_pairs else ""


def each_answer(cfg: AnswerConfig, rows: Iterable[Row], bad: BadRowReport) -> Iterator[Conversation]:
    """Convert rows to prompts with one of their answers, which alone has a loss, like `each_conversation`.

    A row is bad for both answers of a pair or for neither, so that `data.bad_rows=drop` drops whole pairs.
    """
    return each_row(rows, lambda row: _answer_conversation(cfg, row), bad)


def _answer_conversation(cfg: AnswerConfig, row: Row) -> Conversation:
    if cfg.label_column is None:
        label = None
        messages, unflagged, start = _pair_answer(cfg, row.values)
    else:
        label = _label(row, cfg.label_column)
        messages, unflagged = _conversation(cfg, row.values, cfg.answer_key)
        start = 1 + max((i for i, message in enumerate(messages) if message["role"] in _ASKING), default=-1)
        _check_answer(cfg, cfg.answer_key, messages, start, unflagged)
    untrained = {i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i < start} | unflagged
    system = cfg.system_prompt
    if cfg.system_column is not None and row.values.get(cfg.system_column):
        system = text_value(row.values, "system_column", cfg.system_column)
    if system is not None and messages[0]["role"] != "system":
        messages, untrained = [{"role": "system", "content": system}, *messages], {index + 1 for index in untrained}
    return Conversation(row.where, messages, untrained=frozenset(untrained), is_desirable=label)


def _pair_answer(cfg: AnswerConfig, values: dict[str, Any]) -> tuple[list[Message], frozenset[int], int]:
    """Return the conversation with one of the answers of a pair, its messages without loss, and the answer's start.

    The answer is what follows the messages that both conversations share. These are taken from the chosen one, so that
    both samples have the same prompt.
    """
    (chosen, of_chosen), (rejected, of_rejected) = (
        _conversation(cfg, values, key) for key in ("chosen_column", "rejected_column")
    )
    compared = [[[each.get(key) for key in COMPARED] for each in answer] for answer in (chosen, rejected)]
    if compared[0] == compared[1]:
        raise BadRowError(f"data.chosen_column={cfg.chosen_column}: is equal to {cfg.rejected_column!r}")
    pairs = enumerate(zip(*compared, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    _check_answer(cfg, "chosen_column", chosen, start, of_chosen)
    _check_answer(cfg, "rejected_column", rejected, start, of_rejected)
    if cfg.answer_key == "chosen_column":
        return chosen, of_chosen, start
    return [*chosen[:start], *rejected[start:]], of_rejected, start


def _check_answer(cfg: AnswerConfig, key: str, messages: list[Message], start: int, untrained: frozenset[int]) -> None:
    answer = messages[start:]
    if start == 0 or not answer or answer[0]["role"] != ASSISTANT or answer[-1]["role"] != ASSISTANT:
        raise BadRowError(
            f"{getattr(cfg, key)!r} needs an answer of the assistant to a prompt, in this column or in "
            f"data.prompt_column={cfg.prompt_column or 'null'}, that the answers of the row share"
        )
    if untrained.issuperset(i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= start):
        raise BadRowError(f"{getattr(cfg, key)!r}: all messages of the answer are marked as not trained on")


def _conversation(cfg: AnswerConfig, values: dict[str, Any], key: str) -> tuple[list[Message], frozenset[int]]:
    """Return the prompt of a row with the answer in the column that `key` names, and its messages without loss."""
    column, untrained = getattr(cfg, key), frozenset[int]()
    if isinstance(values.get(column), list):
        answer, untrained = messages_of(values[column], column)
        if any(message["role"] in _ASKING for message in answer):
            return answer, untrained
    else:
        text = text_value(values, key, column)
        if cfg.prompt_column is None and (turns := _transcript(text, column)):
            return turns, untrained
        answer = [{"role": ASSISTANT, "content": text}]
    if cfg.prompt_column is None:
        raise BadRowError(
            f"data.prompt_column=null: {column!r} holds an answer without its prompt; the columns are "
            f"{', '.join(cfg.source_columns)}; set data.prompt_column to the column with the prompts"
        )
    prompt = values.get(cfg.prompt_column)
    if isinstance(prompt, list):
        messages, _ = messages_of(prompt, cfg.prompt_column)
    else:
        messages = [{"role": "user", "content": text_value(values, "prompt_column", cfg.prompt_column)}]
    return [*messages, *answer], frozenset(index + len(messages) for index in untrained)


def _transcript(text: str, column: str) -> list[Message]:
    """Return the messages of a text in the form "Human: ... Assistant: ..."; [] for another text."""
    start, *parts = _TURN.split(text.strip())
    if start or not parts or parts[0] != "Human":
        return []
    messages = [
        {"role": _ROLES[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    for number, message in enumerate(messages, start=1):
        if not message["content"]:
            raise BadRowError(f"turn {number} of {column!r} is empty")
    return messages


def _label(row: Row, column: str) -> bool:
    value, classes = row.values.get(column), row.classes.get(column, ())
    if isinstance(value, int) and 0 <= value < len(classes):
        value = classes[value]
    number = number_of(str(value))
    if number not in (0, 1):
        raise BadRowError(f"data.label_column={column}: holds {kind_of(value)}; must be true, false, 1 or 0")
    return bool(number)
