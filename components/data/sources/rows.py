"""Conversion of rows of a file or hub dataset to conversations or documents, using the configured columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from typing import NamedTuple, TypeVar

from components.config.schema.data import (
    BadRows,
    ChatDataConfig,
    LabelsDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
    TrainOn,
)
from components.config.schema.rollouts import PromptsDataConfig
from components.conversation import (
    ASSISTANT,
    FUNCTIONS,
    SYSTEM,
    BadRowError,
    Conversation,
    Message,
    kind_of,
    messages_of,
    system_of,
    template_inputs,
    text_value,
)
from components.data.sources.files import Location, Row
from components.protocol.errors import ConfigError, field_values

Sample = TypeVar("Sample")

_LISTED = 5  # bad rows listed in an error; further ones are only counted
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_TRUTH = {"true": Decimal(1), "false": Decimal(0)}


class Document(NamedTuple):
    """Plain text to train on."""

    where: str
    """Origin of the text for error messages, such as `train.jsonl:17`."""
    text: str


class LabeledText(NamedTuple):
    """A text, or a conversation, with its label."""

    where: str
    """Origin of the text for error messages, such as `train.jsonl:17`."""
    content: str | list[Message]
    label: int

    @property
    def conversation(self) -> Conversation | None:
        """The content as a conversation; None for a text."""
        return None if isinstance(self.content, str) else Conversation(self.where, self.content)


def train_location(cfg: RowsDataConfig) -> Location:
    """Return the location of the training rows."""
    other_split = cfg.eval_split if cfg.eval_path is None else None
    return Location("data.path", cfg.path, cfg.split, cache=cfg.cache, other_split=other_split)


def eval_location(cfg: RowsDataConfig) -> Location | None:
    """Return the location of the held-out rows, or None if they are part of the training rows (`eval_fraction`)."""
    if cfg.eval_path is not None:
        return Location("data.eval_path", cfg.eval_path, cfg.eval_split or cfg.split, cache=cfg.cache)
    if cfg.eval_split is not None:
        return Location("data.path", cfg.path, cfg.eval_split, True, cache=cfg.cache, other_split=cfg.split)
    return None


def columns_wanted(cfg: RowsDataConfig) -> dict[str, str]:
    """Return the required columns, keyed by the config key that sets each."""
    match cfg:
        case SftDataConfig():
            columns = {"prompt_column": cfg.prompt_column, "response_column": cfg.response_column}
            return columns if cfg.input_column is None else {**columns, "input_column": cfg.input_column}
        case PreferencesDataConfig():
            values = field_values(cfg)
            return {key: values[key] for key in cfg.column_keys if values[key] is not None}
        case LabelsDataConfig():
            return {"text_column": cfg.text_column, "label_column": cfg.label_column}
        case ChatDataConfig():
            return {"messages_column": cfg.messages_column}
        case TextDataConfig():
            return {"text_column": cfg.text_column}
        case PromptsDataConfig():
            columns = {"prompt_column": cfg.prompt_column}
            return columns if cfg.answer_column is None else {**columns, "answer_column": cfg.answer_column}
    raise TypeError(f"unsupported data config {type(cfg).__name__}: its columns are not defined")


@dataclass(slots=True)
class BadRowReport:
    """Rows that could not become samples."""

    count: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    """Problems of the first ones in the source, by their origin."""
    samples: list[int] = field(default_factory=list)
    """Indices of the empty samples that stand for those which could not be tokenized, such as a conversation that the
    chat template rejects; other bad rows have no sample."""

    def add(self, problems: Mapping[str, str], count: int = 1) -> None:
        """Count bad rows, of which `problems` has the first ones."""
        self.count += count
        together = {**problems, **self.problems}
        self.problems = {where: together[where] for where in sorted(together, key=_numbers_as_numbers)[:_LISTED]}

    def __str__(self) -> str:
        further = self.count - len(self.problems)
        listed = [f"{where}: {problem}" for where, problem in self.problems.items()]
        return "".join(f"\n  {each}" for each in [*listed, *([f"... and {further:,} more"] if further else [])])


def _numbers_as_numbers(origin: str) -> list[tuple[bool, int, str]]:
    """Return a sort key of origins by which row 9 comes before row 10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", origin)]


def refused_rows(bad: BadRowReport, others: int) -> str:
    """Return the error message of `data.bad_rows=refuse`. others: number of the other rows."""
    count = "1 row" if bad.count == 1 else f"{bad.count:,} rows"
    remedy = ", or set data.bad_rows=drop to leave such rows out" if others else ", there are no other rows"
    return f"data.bad_rows=refuse: {count} cannot become a sample; correct these{remedy}:{bad}"


def no_good_row(source: str, bad: BadRowReport, remedy: str = "correct these") -> str:
    """Return the error message of a split whose rows are all bad with `data.bad_rows=drop`."""
    return f"data.bad_rows=drop: {source} has no rows left, all {bad.count:,} are bad; {remedy}:{bad}"


def columns_optional(cfg: RowsDataConfig) -> list[str]:
    """Return the columns that are read if a source has them."""
    if isinstance(cfg, SftDataConfig):
        return [SYSTEM]
    if isinstance(cfg, ChatDataConfig | PreferencesDataConfig | PromptsDataConfig):
        tools = [] if cfg.tools_column is None else [cfg.tools_column, FUNCTIONS]
        system = [] if isinstance(cfg, PreferencesDataConfig) else [SYSTEM]  # pairs have data.system_column
        return [*tools, *system, *([] if cfg.template_kwargs_column is None else [cfg.template_kwargs_column])]
    return []


def unused_problem(where: str, names: list[str]) -> str:
    """Return the error message of `data.unused_keys=refuse`."""
    return (
        f"data.unused_keys=refuse: {where} has keys that neither the chat template nor Meshbook uses: "
        f"{', '.join(names)}; remove them, or set data.unused_keys=report"
    )


def each_conversation(cfg: RowsDataConfig, rows: Iterable[Row], bad: BadRowReport) -> Iterator[Conversation]:
    """Convert rows to conversations, lazily; bad rows are left out and recorded in `bad`."""
    convert: Callable[..., Conversation] = _chat_conversation
    if isinstance(cfg, SftDataConfig):
        convert = _sft_conversation
    return each_row(rows, lambda row: convert(cfg, row), bad)


def each_document(cfg: TextDataConfig, rows: Iterable[Row], bad: BadRowReport) -> Iterator[Document]:
    """Convert rows to documents, like `each_conversation`.

    Raises ConfigError after the last row if there were bad rows and `data.bad_rows=refuse`. Nothing later rejects a
    document, and a corpus takes long to tokenize.
    """
    column = cfg.text_column
    count = 0
    for document in each_row(rows, lambda row: Document(row.where, text_value(row.values, "text_column", column)), bad):
        count += 1
        yield document
    if bad.count and cfg.bad_rows is BadRows.refuse:
        raise ConfigError(refused_rows(bad, count))


def each_labeled_text(cfg: LabelsDataConfig, rows: Iterable[Row], bad: BadRowReport) -> Iterator[LabeledText]:
    """Convert rows to labeled texts, like `each_conversation`."""
    label_of = cache(partial(_label_index, cfg))
    return each_row(rows, lambda row: _labeled_text(cfg, row, label_of), bad)


def each_row(rows: Iterable[Row], convert: Callable[[Row], Sample], bad: BadRowReport) -> Iterator[Sample]:
    """Convert rows, lazily; bad rows are left out and recorded in `bad`."""
    for row in rows:
        try:
            if row.problem:
                raise BadRowError(row.problem)
            sample = convert(row)
        except BadRowError as error:
            bad.add({row.where: str(error)})
            continue
        yield sample


def _sft_conversation(cfg: SftDataConfig, row: Row) -> Conversation:
    values = row.values
    prompt = text_value(values, "prompt_column", cfg.prompt_column)
    response = text_value(values, "response_column", cfg.response_column)
    if cfg.input_column is not None and str(values.get(cfg.input_column) or "").strip():
        prompt += "\n\n" + text_value(values, "input_column", cfg.input_column)
    system = system_of(values) or cfg.system_prompt
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    messages.append({"role": "assistant", "content": response})
    return Conversation(row.where, messages)


def _labeled_text(cfg: LabelsDataConfig, row: Row, label_of: Callable[..., int | None]) -> LabeledText:
    content = row.values.get(cfg.text_column)
    if isinstance(content, list) and content:
        content, untrained = messages_of(content, cfg.text_column)
        if untrained:
            raise BadRowError(
                f"message {min(untrained) + 1} of {cfg.text_column!r} is marked as not trained on, but a score head "
                "has no loss per message; remove that key"
            )
    else:
        content = text_value(row.values, "text_column", cfg.text_column)
    return LabeledText(row.where, content, _label_in(cfg, row, label_of))


def _label_in(cfg: LabelsDataConfig, row: Row, label_of: Callable[..., int | None]) -> int:
    value, classes = row.values.get(cfg.label_column), tuple(row.classes.get(cfg.label_column, ()))
    label = None if value is None or value != value else label_of(str(value), classes)  # NaN is a missing label
    if label is not None:
        return label
    names, missing = cfg.label_names, "" if cfg.label_column in row.values else " (the key is missing)"
    rule = [f"one of {', '.join(names)}"] if names else []
    if all(number_of(name) is None for name in names):
        rule.insert(0, f"a number from 0 to {len(cfg.labels) - 1}")
    key = "data.label_names" if names else "data.num_labels, or set data.label_names"
    raise BadRowError(
        f"data.label_column={cfg.label_column}: holds {kind_of(value)}{missing}; must be {', or '.join(rule)} ({key})"
    )


def _label_index(cfg: LabelsDataConfig, text: str, classes: Sequence[str]) -> int | None:
    """Return the position of the name in label_names that a label equals, else the number that it is; None: neither.

    It equals a name as text, or as a number. If a name is a number, other numbers are no positions; neither are true
    and false if there are names.

    Args:
        classes: Names of the numbers in the source, which are used if label_names has one of them.
    """
    names = cfg.label_names
    if text.isdecimal() and int(text) < len(classes) and not set(names).isdisjoint(classes):
        text = classes[int(text)]
    number = number_of(text)
    for name in (text, text.strip()):
        if name in names:
            return names.index(name)
    numbers = [number_of(name) for name in names]
    if number is None or numbers.count(number) == 1:
        return None if number is None else numbers.index(number)
    is_position = all(each is None for each in numbers) and not (names and text.strip().lower() in _TRUTH)
    return int(number) if is_position and number in range(len(cfg.labels)) else None


def number_of(text: str) -> Decimal | None:
    """Return the number that a text is, of which true is 1 and false is 0; None: it is none."""
    text = text.strip().lower()
    return _TRUTH.get(text, Decimal(text) if _NUMBER.fullmatch(text) else None)


def _chat_conversation(cfg: ChatDataConfig, row: Row) -> Conversation:
    column = cfg.messages_column
    turns = row.values.get(column)
    if not isinstance(turns, list):
        raise BadRowError(f"data.messages_column={column}: holds {kind_of(turns)}, not a list of messages")
    messages, untrained = messages_of(turns, column, cfg)
    system = system_of(row.values, messages, column)
    tools, kwargs = template_inputs(row.values, cfg.tools_column, cfg.template_kwargs_column)
    conversation = Conversation(row.where, messages, tools, kwargs, untrained).with_system(system)
    roles = [message["role"] for message in conversation.messages]
    if not messages or roles[0] == ASSISTANT or ASSISTANT not in roles:
        raise BadRowError(f"{column!r} needs a message with the role {cfg.assistant_role!r} after another message")
    return conversation.with_last_turn_trained() if cfg.train_on is TrainOn.last else conversation
