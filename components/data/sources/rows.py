"""Conversion of rows of a file or hub dataset to conversations or documents, using the configured columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

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
from components.conversation import ASSISTANT, TOOL, Conversation, Message, arguments_of, function_of, text_of
from components.data.sources.files import Location, Row
from components.protocol.errors import ConfigError, field_values
from components.protocol.safe_parsing import parse_json

Sample = TypeVar("Sample")

_LISTED = 5  # bad rows listed in an error; further ones are only counted
_OTHER_ROLES = ("developer", "function", "ipython")
"""Roles of some chat templates, passed through unchanged."""
_FLAGS = ("weight", "train", "training", "train_on_turn", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale",
          "step_loss_mask")  # fmt: skip
"""Message keys of other trainers that set whether the message is trained on; never passed to the template."""
_INVERSE_FLAG = "masked"
"""Message key that sets whether the message is not trained on (torchtune)."""
_UNCLEAR_FLAGS = ("mask", "train_detail", "training_detail", "train_details")
"""Message keys that select parts of a message, or whose meaning differs between trainers."""
_FUNCTION = "function"
"""Role of the result of a `function_call`, OpenAI's form before `tool_calls`."""
_FUNCTIONS, _SYSTEM = "functions", "system"
"""Columns of other trainers: tools in OpenAI's form before `tools`, and the system message."""
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_TRUTH = {"true": Decimal(1), "false": Decimal(0)}
_RENDER_ARGUMENTS = frozenset(
    [
        *("conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    ]
)
"""Arguments of `apply_chat_template` that are not template variables."""


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


class BadRowError(ValueError):
    """Reason why a row cannot become a conversation or document."""


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
        return [_SYSTEM]
    if not isinstance(cfg, ChatDataConfig):
        return []
    tools = [] if cfg.tools_column is None else [cfg.tools_column, _FUNCTIONS]
    return [*tools, _SYSTEM, *([] if cfg.template_kwargs_column is None else [cfg.template_kwargs_column])]


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
    if cfg.input_column is not None and not _is_blank(values.get(cfg.input_column)):
        prompt += "\n\n" + text_value(values, "input_column", cfg.input_column)
    system = _system_of(values) or cfg.system_prompt
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    messages.append({"role": "assistant", "content": response})
    return Conversation(row.where, messages)


def _system_of(values: dict[str, Any]) -> str | None:
    """Return the text of a row's own column with the system message; None: it has none."""
    system = values.get(_SYSTEM)
    if _is_blank(system):
        return None
    if not isinstance(system, str):
        raise BadRowError(f"column {_SYSTEM!r} holds {kind_of(system)}, not the text of a system message; rename it")
    _check_unicode(system, f"column {_SYSTEM!r} holds")
    return system


def _is_blank(value: Any) -> bool:
    return not (value.strip() if isinstance(value, str) else value)


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


def messages_of(
    turns: list[Any], column: str, cfg: ChatDataConfig | None = None
) -> tuple[list[Message], frozenset[int]]:
    """Return messages, and the indices of assistant messages without loss.

    Args:
        cfg: Keys and roles of the messages; None: role and content.
    """
    cfg = cfg or ChatDataConfig(path=column)
    has_function_calls = any(isinstance(turn, dict) and turn.get("function_call") is not None for turn in turns)
    messages, untrained = list[Message](), set[int]()
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRowError(f"message {number} of {column!r} is {kind_of(turn)}, not an object")
        try:
            if has_function_calls:
                turn = _with_tool_calls(cfg, turn)
            messages.append(_message(cfg, turn))
            if not _is_trained(turn, messages[-1]["role"]) and messages[-1]["role"] == ASSISTANT:
                untrained.add(number - 1)
        except BadRowError as error:
            raise BadRowError(f"message {number} of {column!r} {error}") from error
    return messages, frozenset(untrained)


def _with_tool_calls(cfg: ChatDataConfig, turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its function_call, OpenAI's old form, as tool_calls, and its result as that of a tool."""
    call = turn.get("function_call")
    if call is None:
        return {**turn, cfg.role_key: cfg.tool_role} if turn.get(cfg.role_key) == _FUNCTION else turn
    if turn.get("tool_calls"):
        raise BadRowError("has both 'function_call' and 'tool_calls'; remove one of them")
    if not isinstance(call, dict) or turn.get(cfg.role_key) != cfg.assistant_role:
        raise BadRowError(
            f"has a function_call that is {kind_of(call)} and the role {turn.get(cfg.role_key)!r}; must be an object "
            f"with name and arguments, of {cfg.assistant_role!r}"
        )
    rest = {key: value for key, value in turn.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": call}]}


def _chat_conversation(cfg: ChatDataConfig, row: Row) -> Conversation:
    column = cfg.messages_column
    turns = row.values.get(column)
    if not isinstance(turns, list):
        raise BadRowError(f"data.messages_column={column}: holds {kind_of(turns)}, not a list of messages")
    messages, untrained = messages_of(turns, column, cfg)
    system = _system_of(row.values)
    if system is not None and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
        untrained = frozenset(index + 1 for index in untrained)
    elif system is not None and messages and text_of(messages[0]["content"]) != system:
        raise BadRowError(f"message 1 of {column!r} and column {_SYSTEM!r} are different system messages; remove one")
    if not messages or messages[0]["role"] == ASSISTANT or all(m["role"] != ASSISTANT for m in messages):
        raise BadRowError(f"{column!r} needs a message with the role {cfg.assistant_role!r} after another message")
    # An empty list becomes None, because some templates render a tools section even for an empty list.
    tools = _decoded(row.values, "tools_column", cfg.tools_column, list) or None
    if cfg.tools_column is not None and (functions := row.values.get(_FUNCTIONS)):
        if tools is not None or not isinstance(functions, list):
            raise BadRowError(
                f"column {_FUNCTIONS!r} (OpenAI's old form of tools) holds {kind_of(functions)}; must be a list of "
                f"objects, in rows without {cfg.tools_column!r}"
            )
        tools = [{"type": "function", "function": function} for function in functions]
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError(f"data.tools_column={cfg.tools_column}: holds a list with entries other than objects")
    kwargs = _decoded(row.values, "template_kwargs_column", cfg.template_kwargs_column, dict) or {}
    if reserved := sorted(_RENDER_ARGUMENTS & kwargs.keys()):
        raise BadRowError(
            f"data.template_kwargs_column={cfg.template_kwargs_column}: {reserved[0]} is an argument of "
            "apply_chat_template, not a template variable; remove it"
        )
    conversation = Conversation(row.where, messages, tools, kwargs, untrained)
    return conversation.with_last_turn_trained() if cfg.train_on is TrainOn.last else conversation


def _message(cfg: ChatDataConfig, turn: dict[str, Any]) -> Message:
    """Rename a message's role and keys to those of chat templates; keep its other keys except the training flags."""
    roles = {cfg.system_role: "system", cfg.user_role: "user", cfg.assistant_role: ASSISTANT, cfg.tool_role: TOOL}
    roles |= {role: role for role in _OTHER_ROLES if role not in roles}
    given = turn.get(cfg.role_key)
    if not isinstance(given, str) or given not in roles:
        raise BadRowError(
            f"has the role {given!r} (data.role_key={cfg.role_key}), which is not one of {', '.join(roles)}; set "
            "data.user_role, data.assistant_role, data.system_role or data.tool_role"
        )
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


def _decoded(values: dict[str, Any], key: str, name: str | None, kind: type) -> Any:
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


def text_value(values: dict[str, Any], key: str, name: str) -> str:
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
    return "null" if value is None else f"{type(value).__name__} {value!r:.40}"
