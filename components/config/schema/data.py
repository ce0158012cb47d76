"""`data`: what is learned from. One class per kind of source; an option of conf/data/ opens with its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum

from components.config.schema.checks import at_least, field_values, own_kind, raise_all

IGNORED = -100
"""Label or target of a position that has no loss: the `ignore_index` of PyTorch and Hugging Face."""


class DataKind(StrEnum):
    """docs: Python's documentation; sft: prompt and response; chat: messages; text: documents; custom: your function;
    mixture: several of these; preferences: prompts with a chosen and a rejected answer."""

    docs = "docs"
    sft = "sft"
    chat = "chat"
    text = "text"
    custom = "custom"
    mixture = "mixture"
    preferences = "preferences"


class Overlong(StrEnum):
    """What becomes of a sample longer than seq_len: cut on the right, left out, or refused."""

    truncate = "truncate"
    drop = "drop"
    refuse = "refuse"


class UnusedKeys(StrEnum):
    """What becomes of data that would not reach the model: reported by name, or refused."""

    report = "report"
    refuse = "refuse"


class BadRows(StrEnum):
    """What becomes of a row without a prompt or without a response: refused, or left out and counted."""

    refuse = "refuse"
    drop = "drop"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What every kind has. Samples are read and tokenized at the start, and kept on disk or in memory as integers."""

    kind: DataKind
    """Which of the classes below this is; set by the option of conf/data/."""
    split: str = "train"
    """Split that is trained on; a single file is one split, whatever its name."""
    eval_split: str | None = None
    """Split that is evaluated on; null: `eval_fraction` of `split` is held out."""
    eval_fraction: float = 0.05
    """Share of `split` that is held out where there is no eval_split, chosen by a hash of the prompt (of a text: of the
    document; of fewer documents than 1 / eval_fraction: the end of each)."""
    max_samples: int | None = None
    """At most this many training samples, the first of the source; null: all."""
    max_eval_samples: int | None = None
    """At most this many held-out samples, the first of the source; null: all."""
    overlong: Overlong = Overlong.truncate
    """Samples of more than seq_len tokens: truncate cuts the right end, drop omits them, refuse stops."""
    pack: bool = False
    """Several samples per row of seq_len tokens, each seeing only itself; sizes in sequences then count rows."""
    cache: str | None = "~/.cache/meshbook"
    """Folder that keeps tokenized samples for the next run and for other processes, until none has read them for 30
    days; null: they are kept in memory."""
    weight: float | None = None
    """Of a source of a mixture: its share of the rows, relative to the weights of the others; null: 1."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        problems = [
            *at_least("data.max_samples", self.max_samples, 1),
            *at_least("data.max_eval_samples", self.max_eval_samples, 1),
            *own_kind("data", self),
        ]
        if not 0 <= self.eval_fraction < 1:
            problems.append(
                f"data.eval_fraction={self.eval_fraction}: must be at least 0 (nothing held out) and below 1"
            )
        if self.weight is not None and not 0 < self.weight < math.inf:
            problems.append(f"data.weight={self.weight}: must be a number greater than 0")
        if self.cache == "":
            problems.append("data.cache='': is empty; set it to a folder, or to null to keep nothing")
        if self.eval_split == self.split and not (isinstance(self, RowsDataConfig) and self.eval_path is not None):
            problems.append(
                f"data.eval_split={self.eval_split}: is the split that is trained on; choose another, or "
                "null to hold out data.eval_fraction of it"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class DocsDataConfig(DataConfig):
    """Questions and answers made from the interpreter's standard library: no file, no network, seconds."""

    kind: DataKind = DataKind.docs
    """docs."""
    eval_split: str | None = "eval"
    """Splits are by module: `train`, and `eval` for the modules that are held out."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        for key, split in (("split", self.split), ("eval_split", self.eval_split)):
            if split not in ("train", "eval", None):
                problems.append(f"data.{key}={split}: the documentation has the splits train and eval")
        return problems


@dataclass(kw_only=True, slots=True)
class RowsDataConfig(DataConfig):
    """Rows of a file, a folder of files or a hub data set: the common part of `sft`, `chat` and `text`."""

    path: str
    """JSONL, JSON, CSV, TSV or Parquet file, a folder of them (train.jsonl, test.jsonl), or a hub name."""
    eval_path: str | None = None
    """Where held-out rows come from, if not from path; its split is eval_split, or split without one."""
    subset: str | None = None
    """Configuration of a hub data set, such as main; local files have none."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; null: its newest. Local files have none."""
    bad_rows: BadRows = BadRows.refuse
    """Rows without prompt or response: refuse names them and stops, drop leaves them out and counts them."""
    unused_keys: UnusedKeys = UnusedKeys.report
    """Columns, and keys of messages, that neither the chat template nor Meshbook uses: report names them, refuse
    stops."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        for key, place in (("path", self.path), ("eval_path", self.eval_path)):
            if place == "":
                problems.append(f"data.{key}='': is empty; set data.{key} to a file, a folder or a hub name")
        return problems


@dataclass(kw_only=True, slots=True)
class SftDataConfig(RowsDataConfig):
    """One prompt and one response per row. The loss is taken on the response."""

    kind: DataKind = DataKind.sft
    """sft."""
    prompt_column: str = "prompt"
    """Column with the prompt (question, instruction)."""
    input_column: str | None = None
    """Column whose text, where a row has any, follows the prompt after an empty line (Alpaca's input)."""
    response_column: str = "response"
    """Column with the response (answer, output)."""
    system_prompt: str | None = None
    """System message put before every prompt; null: what the chat template does without one."""

    def _problems(self) -> list[str]:
        columns = {"prompt_column": self.prompt_column, "response_column": self.response_column}
        if self.input_column is not None:
            columns["input_column"] = self.input_column
        return RowsDataConfig._problems(self) + _name_problems(columns)


@dataclass(kw_only=True, slots=True)
class PreferencesDataConfig(RowsDataConfig):
    """One prompt with a chosen and a rejected answer per row. Batch sizes count pairs."""

    kind: DataKind = DataKind.preferences
    """preferences."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    chosen_column: str = "chosen"
    """Column with the preferred answer."""
    rejected_column: str = "rejected"
    """Column with the other answer."""
    system_prompt: str | None = None
    """System message put before every prompt; null: what the chat template does without one."""

    def _problems(self) -> list[str]:
        columns = {
            "prompt_column": self.prompt_column,
            "chosen_column": self.chosen_column,
            "rejected_column": self.rejected_column,
        }
        problems = RowsDataConfig._problems(self) + _name_problems(columns)
        if self.pack:
            problems.append("data.pack=true: pairs are not packed; set data.pack=false")
        if self.bad_rows is not BadRows.refuse:
            problems.append(f"data.bad_rows={self.bad_rows}: a pair needs both answers; set data.bad_rows=refuse")
        return problems


@dataclass(kw_only=True, slots=True)
class ChatDataConfig(RowsDataConfig):
    """One conversation per row: a list of messages, given to the chat template as they are. The loss is taken on every
    turn of the assistant (text, tool calls, reasoning) but those with `train: false` or `weight: 0`."""

    kind: DataKind = DataKind.chat
    """chat."""
    messages_column: str = "messages"
    """Column with the list of messages."""
    role_key: str = "role"
    """Key of a message that holds who speaks (ShareGPT: from)."""
    content_key: str = "content"
    """Key of a message that holds the text (ShareGPT: value)."""
    system_role: str = "system"
    """Name of the system's role in the data."""
    user_role: str = "user"
    """Name of the user's role in the data (ShareGPT: human)."""
    assistant_role: str = "assistant"
    """Name of the assistant's role in the data (ShareGPT: gpt)."""
    tool_role: str = "tool"
    """Name of the role in the data that holds what a tool returned."""
    tools_column: str | None = "tools"
    """Column, where there is one, with the tools of a conversation: a list of JSON schemas, or JSON text of it."""
    template_kwargs_column: str | None = "chat_template_kwargs"
    """Column, where there is one, with further variables of the chat template: an object such as
    {"enable_thinking": false}, or JSON text of it."""

    def _problems(self) -> list[str]:
        keys = {"role_key": self.role_key, "content_key": self.content_key}
        roles = {
            "system_role": self.system_role,
            "user_role": self.user_role,
            "assistant_role": self.assistant_role,
            "tool_role": self.tool_role,
        }
        columns = {"messages_column": self.messages_column}
        if self.tools_column is not None:
            columns["tools_column"] = self.tools_column
        if self.template_kwargs_column is not None:
            columns["template_kwargs_column"] = self.template_kwargs_column
        return [
            *RowsDataConfig._problems(self),
            *_name_problems(columns),
            *_name_problems(keys),
            *_name_problems(roles),
        ]


@dataclass(kw_only=True, slots=True)
class TextDataConfig(RowsDataConfig):
    """Documents to continue, cut into samples of seq_len tokens. Every token but a document's first carries loss."""

    kind: DataKind = DataKind.text
    """text."""
    text_column: str = "text"
    """Column with a document's text. A .txt file is one document; path=python:stdlib is the interpreter's source."""

    def _problems(self) -> list[str]:
        problems = RowsDataConfig._problems(self) + _name_problems({"text_column": self.text_column})
        if self.overlong is not Overlong.truncate:
            problems.append(
                f"data.overlong={self.overlong}: documents are cut into samples of training.seq_len tokens, none is "
                "longer; leave data.overlong out"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class CustomDataConfig(DataConfig):
    """Your own function: factory(tokenizer, seq_len, split) returns a sequence of components.data.Example."""

    kind: DataKind = DataKind.custom
    """custom."""
    factory: str
    """Import path of the function, such as my_package.my_data:build."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        module, _, function = self.factory.partition(":")
        if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            problems.append(f"data.factory={self.factory}: must be module:function, such as my_package.my_data:build")
        return problems


_OF_A_SOURCE = ("split", "eval_split", "eval_fraction", "max_samples", "max_eval_samples", "overlong")


@dataclass(kw_only=True, slots=True)
class MixtureDataConfig(DataConfig):
    """Several sources, each an option of conf/data/ under a name of yours, mixed row by row in shares by weight."""

    kind: DataKind = DataKind.mixture
    """mixture."""
    sources: dict[str, DataConfig] = field(default_factory=dict)
    """By name: +data@data.sources.NAME=OPTION; then data.sources.NAME.weight and the option's other keys."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        if not self.sources:
            problems.append(
                "data.sources={}: a mixture needs sources; add each by a name of yours: +data@data.sources.NAME=OPTION"
            )
        problems += [
            f"data.{key}={value}: each source of a mixture has its own; set data.sources.NAME.{key}"
            for key, value in _changed(self, _OF_A_SOURCE)
        ]
        for name, source in self.sources.items():
            problems += self._problems_of(f"data.sources.{name}", source)
        return problems

    def _problems_of(self, key: str, source: DataConfig) -> list[str]:
        """Return what is wrong with the source at `key` as part of this mixture."""
        problems = [
            f"{key}.cache={value}: all sources have one; leave it out" for _, value in _changed(source, ["cache"])
        ]
        if source.pack and not self.pack:
            problems.append(
                f"{key}.pack=true: all sources are packed or none; set it to false, or the mixture's to true"
            )
        return problems


def _changed(cfg: DataConfig, keys: Iterable[str]) -> list[tuple[str, object]]:
    """Of some keys that every kind has, those with another value than their default."""
    defaults = {each.name: each.default for each in fields(DataConfig)}
    values = field_values(cfg)
    return [(key, values[key]) for key in keys if values[key] != defaults[key]]


def _name_problems(names: dict[str, str]) -> list[str]:
    """Names in the data must be given, and differ from one another."""
    problems = [f"data.{key}='': is empty; name it as in the data" for key, name in names.items() if not name]
    first_key: dict[str, str] = {}
    for key, name in names.items():
        if name and first_key.setdefault(name, key) != key:
            problems.append(f"data.{key}={name}: is data.{first_key[name]} already; the two must differ")
    return problems
