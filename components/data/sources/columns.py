"""Columns of sources: those of pairs, labeled answers and prompts, and the settings that fit a source's columns.

The columns and forms of the usual hub datasets need no options: prompts and answers are texts or lists of messages,
answers may be whole conversations, also as one text ("Human: ... Assistant: ..."), and a column may hold the system
message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from components.config.schema.data import (
    ChatDataConfig,
    LabelsDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
)
from components.config.schema.rollouts import PromptsDataConfig
from components.conversation import (
    ASSISTANT,
    BadRowError,
    Conversation,
    Message,
    kind_of,
    messages_of,
    prompt_in,
    template_inputs,
    text_value,
)
from components.data.sources.files import Row, check_columns
from components.data.sources.rows import BadRowReport, columns_wanted, each_row, number_of
from components.protocol.errors import ConfigError, field_values

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


class PromptRow(NamedTuple):
    """A prompt whose answers are sampled, and the other columns of its row."""

    where: str
    """Origin of the prompt for error messages, such as `train.jsonl:17`."""
    content: str | list[Message]
    """The prompt as the data has it; messages also with the system message of its row."""
    columns: Mapping[str, Any]
    conversation: Conversation | None = None
    """The prompt with its system message, tools and template variables; None: a text without them."""


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


def each_prompt(cfg: PromptsDataConfig, rows: Iterable[Row], bad: BadRowReport) -> Iterator[PromptRow]:
    """Convert rows to prompts, like `each_conversation`."""
    return each_row(rows, lambda row: _prompt_row(cfg, row), bad)


def _prompt_row(cfg: PromptsDataConfig, row: Row) -> PromptRow:
    column = cfg.prompt_column
    prompt = prompt_in(row.values, column, row.where, (cfg.tools_column, cfg.template_kwargs_column))
    content = row.values.get(column)
    if cfg.answer_column is not None and cfg.answer_column not in row.values:
        raise BadRowError(f"data.answer_column={cfg.answer_column}: the key is missing")
    columns = {name: value for name, value in row.values.items() if name != column}
    if isinstance(prompt, str):
        return PromptRow(row.where, prompt, columns)
    return PromptRow(row.where, content if isinstance(content, str) else prompt.messages, columns, prompt)


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
    tools, kwargs = template_inputs(row.values, cfg.tools_column, cfg.template_kwargs_column)
    return Conversation(row.where, messages, tools, kwargs, frozenset(untrained), label).with_system(system)


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
    answer, column = messages[start:], getattr(cfg, key)
    if start == 0 or not answer or answer[0]["role"] != ASSISTANT or answer[-1]["role"] != ASSISTANT:
        raise BadRowError(
            f"{column!r} needs an answer of the assistant to a prompt, in this column or in "
            f"data.prompt_column={cfg.prompt_column or 'null'}, that the answers of the row share"
        )
    if untrained.issuperset(i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= start):
        raise BadRowError(f"{column!r}: all messages of the answer are marked as not trained on")


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


_MEANINGS = {
    "messages": "messages conversations conversation dialog dialogue turns chat",
    "chosen": "chosen chosen_response preferred better accepted win winner response_chosen answer_chosen",
    "rejected": "rejected rejected_response dispreferred worse lose loser response_rejected answer_rejected",
    "prompt": "prompt question instruction query problem input user",
    "response": "response answer output completion target solution reply assistant",
    "text": "text content sentence document body review raw_content",
    "label": "label labels class category sentiment target intent",
}
"""Meaning of a column -> its usual names in lower case, the likeliest first."""
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker"), ("content", "value", "text")
_ROLE_NAMES = {"user_role": ("user", "human"), "assistant_role": ("assistant", "gpt", "bot", "model")}
_MOST_NAMES = 20  # of labels that a setting lists
_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_PLAIN = re.compile(r"[\w./:@+%-]+", re.ASCII)


@dataclass(frozen=True)
class _Fit:
    """A kind of data that columns have."""

    kind: type[RowsDataConfig]
    recipe: str
    option: str
    settings: Mapping[str, object]
    before: str = ""
    """Settings of other sections, before those of data."""


def fitted(
    problems: list[str], cfg: RowsDataConfig, key: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Return one problem that ends with what to write for a source with these columns; if that is not clear, all.

    Args:
        problems: Columns that `cfg` names and the source lacks.
        cfg: The settings.
        key: Key of the source's path; held-out rows have the columns of the training rows.
        columns: Columns of the source.
        rows: Its first rows.
    """
    fact = re.split("; (?:did you mean|set data)", problems[0])[0] if problems and key == "data.path" else ""
    remedy = _remedy(cfg, columns, rows) if fact else ""
    return [f"{fact}; {remedy}"] if remedy else problems


def _remedy(cfg: RowsDataConfig, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    found = _meanings(columns, rows)
    fits = _fits(found, columns, rows)
    order = [PreferencesDataConfig, ChatDataConfig, SftDataConfig, LabelsDataConfig, TextDataConfig]
    if isinstance(cfg, PromptsDataConfig):
        names = {"prompt_column": found.get("prompt") or found.get("messages"), "answer_column": found.get("response")}
        return (
            "write " + " ".join(f"data.{key}={name}" for key, name in names.items() if name)
            if any(names.values())
            else ""
        )
    if isinstance(cfg, TextDataConfig | LabelsDataConfig):
        order.sort(key=lambda kind: kind is not type(cfg))
    fit = next((fit for kind in order for fit in fits if fit.kind is kind), None)
    if fit is None or not (line := _line(cfg, fit)):
        return ""
    if fit.kind is SftDataConfig and rows and isinstance(rows[0].get(found.get("response", "")), list):
        return f"join the messages of both columns in a column messages, and write data=chat_jsonl data.path={cfg.path}"
    own = "recipes/finetune.py"
    if isinstance(cfg, PreferencesDataConfig | LabelsDataConfig):
        own = "recipes/dpo.py" if isinstance(cfg, PreferencesDataConfig) else "recipes/classify.py"
    if own == "recipes/classify.py" and fit.option == "preferences" and not fit.before:
        return f"write objective=reward {line}"
    is_pretraining = isinstance(cfg, TextDataConfig) and fit.kind is not TextDataConfig  # no chat template there
    return f"write {line}" if fit.recipe == own and not is_pretraining else f"use {fit.recipe} {line}"


def _meanings(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the columns by their meaning."""
    found: dict[str, str] = {}
    for meaning, names in _MEANINGS.items():
        usual = [column for name in names.split() for column in columns if column.lower() == name]
        if usual:
            found[meaning] = usual[0]
    if rows and not isinstance(rows[0].get(found.get("messages", "")), list):
        found.pop("messages", None)
    return found


def _fits(found: Mapping[str, str], columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[_Fit]:
    """Return the kinds of data that a source with these columns can be."""
    fits: list[_Fit] = []
    settings: dict[str, object]
    labels = [row.get(found.get("label", "")) for row in rows]
    if {"chosen", "rejected"} <= found.keys():
        settings = {f"{each}_column": found[each] for each in ("prompt", "chosen", "rejected") if each in found}
        fits.append(_Fit(PreferencesDataConfig, "recipes/dpo.py", "preferences", settings))
    # A boolean label is a judgement of the response (KTO); a class is of the text.
    if {"prompt", "response", "label"} <= found.keys() and all(isinstance(label, bool) for label in labels):
        settings = {"prompt_column": found["prompt"], "completion_column": found["response"]}
        settings |= {} if found["label"] == "label" else {"label_column": found["label"]}
        fits.append(_Fit(PreferencesDataConfig, "recipes/dpo.py", "preferences", settings, "objective=kto"))
    if "messages" in found:
        fits.append(_Fit(ChatDataConfig, "recipes/finetune.py", "chat_jsonl", _chat_settings(found["messages"], rows)))
    if {"instruction", "input", "output"} <= set(columns):
        settings = {"prompt_column": "instruction", "input_column": "input", "response_column": "output"}
        fits.append(_Fit(SftDataConfig, "recipes/finetune.py", "alpaca", settings))
    elif {"prompt", "response"} <= found.keys():
        settings = {"prompt_column": found["prompt"], "response_column": found["response"]}
        fits.append(_Fit(SftDataConfig, "recipes/finetune.py", "jsonl", settings))
    if {"text", "label"} <= found.keys():
        settings = {"text_column": found["text"], "label_column": found["label"], **_label_settings(labels)}
        fits.append(_Fit(LabelsDataConfig, "recipes/classify.py", "labels", settings))
    if "text" in found:
        fits.append(_Fit(TextDataConfig, "recipes/finetune.py", "text", {"text_column": found["text"]}))
    return fits


def _chat_settings(column: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the settings of messages in a column, such as those of ShareGPT."""
    turns = [turn for row in rows for turn in row.get(column) or () if isinstance(turn, dict)]
    settings: dict[str, object] = {"messages_column": column}
    for name, keys in (("role_key", _ROLE_KEYS), ("content_key", _CONTENT_KEYS)):
        present = [key for key in keys if any(key in turn for turn in turns)]
        settings |= {name: present[0]} if present else {}
    roles = {turn.get(settings.get("role_key")) for turn in turns}
    for name, usual in _ROLE_NAMES.items():
        present = [role for role in usual if role in roles]
        settings |= {name: present[0]} if present else {}
    return settings


def _label_settings(labels: Sequence[Any]) -> dict[str, object]:
    """Return the number or the names of the labels in the first rows."""
    present = [label for label in labels if label is not None]
    if present and all(isinstance(each, int) for each in present):
        return {"num_labels": max(2, *(int(each) + 1 for each in present))}
    names = sorted({str(each) for each in present})
    is_short = 1 < len(names) <= _MOST_NAMES and all(map(_NAME.fullmatch, names))
    return {"label_names": names} if is_short else {}


def _line(cfg: RowsDataConfig, fit: _Fit) -> str:
    """Return the settings of a kind that differ from those of `cfg`, or from those of the kind's option."""
    is_same = isinstance(cfg, fit.kind) and fit.option != "alpaca"
    given = field_values(cfg) if is_same else {each.name: each.default for each in fields(fit.kind)}
    automatic = {"prompt_column": ("prompt", "question", "instruction", "input"), "chosen_column": ("chosen",),
                 "rejected_column": ("rejected",), "completion_column": ("completion", "response")}  # fmt: skip
    changed = []
    for key, value in fit.settings.items():
        is_found = fit.kind is PreferencesDataConfig and given[key] is None and value in automatic.get(key, ())
        if given[key] != value and not is_found and fit.option != "alpaca":
            changed.append(f"data.{key}={'[' + ','.join(value) + ']' if isinstance(value, list) else value}")
    path = f"data.path={cfg.path}" if _PLAIN.fullmatch(cfg.path) else f"\"data.path='{cfg.path}'\""
    option = [] if is_same else [f"data={fit.option}", path]
    return " ".join([*([fit.before] if fit.before else []), *option, *changed])
