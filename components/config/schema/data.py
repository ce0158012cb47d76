"""`data`: datasets, splits and columns. One class per kind of source; an option of conf/data/ selects one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from components.config.schema.training import StageConfig, stage_problems
from components.protocol.errors import above, at_least, distinct_names, field_values, own_kind, raise_all
from components.storage.object_store import is_url, url_problems

IGNORED = -100
"""Label or target of a position without loss: the `ignore_index` of PyTorch and Hugging Face."""


class DataKind(StrEnum):
    """docs: Python's documentation; sft: prompts and responses; chat: conversations; text: plain documents; custom:
    your own function; mixture: several sources; preferences: prompts with a chosen and a rejected answer; labels: texts
    with a class; tokens: a token store; prompts: prompts only, of which the answers are sampled."""

    docs = "docs"
    sft = "sft"
    chat = "chat"
    text = "text"
    custom = "custom"
    mixture = "mixture"
    preferences = "preferences"
    labels = "labels"
    tokens = "tokens"
    prompts = "prompts"


class Overlong(StrEnum):
    """Handling of samples longer than seq_len. truncate: cut the right end; drop: skip; refuse: fail; keep_last: leave
    out the oldest turns."""

    truncate = "truncate"
    drop = "drop"
    refuse = "refuse"
    keep_last = "keep_last"


class TrainOn(StrEnum):
    """Turns of a conversation with a loss. all: every turn of the assistant; last: the last one."""

    all = "all"
    last = "last"


class UnusedKeys(StrEnum):
    """Handling of columns and message keys that are not used. report: log their names; refuse: fail."""

    report = "report"
    refuse = "refuse"


class BadRows(StrEnum):
    """Handling of rows without a prompt or a response. refuse: fail; drop: skip and count."""

    refuse = "refuse"
    drop = "drop"


class Balance(StrEnum):
    """Places of a step's rows. auto: dealt to ranks and micro-batches by their cost; none: as they are drawn."""

    auto = "auto"
    none = "none"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Keys of every kind. Samples are read and tokenized at the start; token ids are stored on disk or in memory."""

    kind: DataKind
    """Selects one of the subclasses below; set by the option of conf/data/."""
    split: str = "train"
    """Train split. A single file is one split, and its name is ignored."""
    eval_split: str | None = None
    """Held-out split for evaluation; null: hold out `eval_fraction` of `split`."""
    eval_fraction: float = 0.05
    """Share of `split` to hold out if eval_split is null, in [0, 1). Samples are selected by a hash of the prompt, and
    equal prompts stay together; of plain text, by a hash of the document, or the end of each document if there are
    fewer than 1 / eval_fraction."""
    max_samples: int | None = None
    """Use only the first this many training samples of the source, at least 1; null: all."""
    max_eval_samples: int | None = None
    """Use only the first this many held-out samples of the source, at least 1; null: all."""
    overlong: Overlong = Overlong.truncate
    """Samples of more than seq_len tokens: truncate (cut the right end), drop (skip them), refuse (fail the run) or, of
    data=chat_jsonl, keep_last: leave out the oldest turns until the rest fits, with the system message and the tools. A
    turn begins with a user message and is never cut; a sample whose newest turn is too long is dropped."""
    pack: bool = False
    """Pack several samples into each row of seq_len tokens. Samples do not attend to each other, and batch sizes count
    rows. Preference pairs are packed into rows of 2 x seq_len tokens. Requires model.attention=sdpa or sdpa_flash."""
    balance: Balance = Balance.auto
    """Deal the rows of each step to ranks and micro-batches by their cost, the squared lengths of their documents plus
    a term for their tokens, so that no rank waits long for another; none keeps the order in which rows are drawn. The
    rows of a step, its loss and its gradient are the same. Rows of token stores and pairs of answers keep their order.
    """
    cache: str | None = "~/.cache/meshbook"
    """Folder that stores tokenized samples, shared by processes and later runs; entries not read for 30 days are
    deleted. null: keep them in memory."""
    weight: float | None = None
    """Only for a source of a mixture: its share of the rows relative to the other sources' weights, greater than 0;
    null: 1."""

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
                f"data.eval_fraction={self.eval_fraction}: must be at least 0 (nothing held out) and less than 1"
            )
        if self.weight is not None and not 0 < self.weight < math.inf:
            problems.append(f"data.weight={self.weight}: must be a number greater than 0")
        if self.cache == "":
            problems.append("data.cache='': is empty; set it to a folder, or to null for no cache")
        if self.eval_split == self.split and not (isinstance(self, RowsDataConfig) and self.eval_path is not None):
            problems.append(
                f"data.eval_split={self.eval_split}: is also the train split, data.split; choose another, or "
                "null to hold out data.eval_fraction of it"
            )
        return problems

    def _object_problems(self, paths: Mapping[str, str | None]) -> list[str]:
        """Return the problems of the paths that are URLs of object stores, by key."""
        problems = []
        for key, path in paths.items():
            problems += url_problems(f"data.{key}", path)
            if self.cache is None and path is not None and is_url(path):
                problems.append(f"data.cache=null: objects of {path} are copied to it; set data.cache to a folder")
        return problems


@dataclass(kw_only=True, slots=True)
class DocsDataConfig(DataConfig):
    """Questions and answers generated from the docstrings of Python's standard library in seconds; needs no file and no
    network."""

    kind: DataKind = DataKind.docs
    """docs."""
    eval_split: str | None = "eval"
    """train or eval, which cover different modules; null: hold out `eval_fraction` of `split`."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        for key, split in (("split", self.split), ("eval_split", self.eval_split)):
            if split not in ("train", "eval", None):
                problems.append(f"data.{key}={split}: must be train or eval, the splits of the documentation")
        return problems


@dataclass(kw_only=True, slots=True)
class RowsDataConfig(DataConfig):
    """Keys shared by the kinds whose data are rows of a file, a folder of files or a hub dataset."""

    path: str
    """JSONL, JSON, CSV, TSV, Parquet or Arrow file (.jsonl.gz, .jsonl.zst: compressed), a folder with a file per split
    (train.jsonl, test.jsonl), a URL of either (s3://, gs://, az://, hf://), which is copied to `cache`, or the name of
    a hub dataset."""
    eval_path: str | None = None
    """File, folder, URL or hub dataset with the held-out rows, split eval_split (or split if that is null); null:
    path."""
    subset: str | None = None
    """Configuration of a hub dataset, such as main; null for local files."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; null: the newest commit, or local files."""
    bad_rows: BadRows = BadRows.refuse
    """Rows that cannot become a sample, such as those without a prompt, a response, a text or a label, and
    conversations that the chat template rejects: refuse (fail with the row numbers) or drop (skip and count them)."""
    unused_keys: UnusedKeys = UnusedKeys.report
    """Columns and message keys that neither the chat template nor Meshbook uses: report (log their names) or refuse
    (fail the run)."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        for key, place in (("path", self.path), ("eval_path", self.eval_path)):
            if place == "":
                problems.append(f"data.{key}='': is empty; set data.{key} to a file, a folder or a hub name")
        return problems + self._object_problems({"path": self.path, "eval_path": self.eval_path})


@dataclass(kw_only=True, slots=True)
class SftDataConfig(RowsDataConfig):
    """One prompt and one response per row. Only response tokens have a loss."""

    kind: DataKind = DataKind.sft
    """sft."""
    prompt_column: str = "prompt"
    """Column that holds the prompt (question, instruction)."""
    input_column: str | None = None
    """Column whose text, if not empty, is appended to the prompt after a blank line (Alpaca's input); null: none."""
    response_column: str = "response"
    """Column that holds the response (answer, output)."""
    system_prompt: str | None = None
    """System message inserted before every prompt; null: the default of the chat template."""

    def _problems(self) -> list[str]:
        columns = {
            "prompt_column": self.prompt_column,
            "response_column": self.response_column,
            "input_column": self.input_column,
        }
        return RowsDataConfig._problems(self) + distinct_names("data", columns)


@dataclass(kw_only=True, slots=True)
class ScoredDataConfig(RowsDataConfig):
    """Base of the kinds that recipes/classify.py accepts."""


@dataclass(kw_only=True, slots=True)
class LabelsDataConfig(ScoredDataConfig):
    """A text, or a list of messages, and its label per row, for recipes/classify.py."""

    kind: DataKind = DataKind.labels
    """labels."""
    text_column: str = "text"
    """Column that holds the text, or a list of messages, which the chat template renders."""
    label_column: str = "label"
    """Column that holds the label: one of label_names, as text or number, or else its number from 0 to num_labels - 1.
    If one of label_names is a number, every label is a name."""
    num_labels: int | None = None
    """Number of labels, at least 2; null: the number of label_names."""
    label_names: list[str] = field(default_factory=list)
    """Names of the labels in the order of their numbers; []: LABEL_0, LABEL_1, ..."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each label."""
        return tuple(self.label_names) or tuple(f"LABEL_{number}" for number in range(self.num_labels or 0))

    def _problems(self) -> list[str]:
        columns = {"text_column": self.text_column, "label_column": self.label_column}
        problems = RowsDataConfig._problems(self) + distinct_names("data", columns)
        names = self.label_names
        if self.num_labels is None and not names:
            problems.append(
                "data.num_labels=null: the number of labels is required; set data.num_labels, or "
                "data.label_names=[NAME, NAME, ...], or for pairs of answers objective=reward data=preferences"
            )
        elif names and self.num_labels not in (None, len(names)):
            problems.append(
                f"data.num_labels={self.num_labels}: data.label_names has {len(names)} names; remove data.num_labels, "
                "or correct one of them"
            )
        elif len(self.labels) < 2:
            key = f"data.label_names={names}" if names else f"data.num_labels={self.num_labels}"
            problems.append(f"{key}: classification needs at least 2 labels")
        if len(set(names)) < len(names) or "" in names:
            problems.append(f"data.label_names={names}: the names must differ, and none may be empty")
        return problems


@dataclass(kw_only=True, slots=True)
class PreferencesDataConfig(ScoredDataConfig):
    """A chosen and a rejected answer to one prompt per row, for recipes/dpo.py and reward models; or one labeled answer
    per row, for objective=kto. Prompts and answers are texts or lists of messages. Batch sizes count rows."""

    kind: DataKind = DataKind.preferences
    """preferences."""
    prompt_column: str | None = None
    """Column that holds the prompt, which answers that are whole conversations do not need; null: prompt, question,
    instruction or input, whichever comes first and exists."""
    system_column: str | None = None
    """Column that holds the system message of prompts without one; null: system, if it exists."""
    chosen_column: str | None = None
    """Column that holds the preferred answer, or the whole conversation with it, as messages or as text in the form
    "Human: ... Assistant: ..."; null: chosen or chosen_response."""
    rejected_column: str | None = None
    """Column that holds the rejected answer, or the whole conversation with it; null: rejected or rejected_response."""
    label_column: str | None = None
    """Column that holds true for a desirable answer and false for an undesirable one; null: rows are pairs."""
    completion_column: str | None = None
    """Column that holds the labeled answer; used instead of chosen_column and rejected_column if label_column is set;
    null: completion or response."""
    system_prompt: str | None = None
    """System message inserted before prompts without one; null: the default of the chat template."""
    tools_column: str | None = "tools"
    """Optional column with the tools of a prompt: a list of JSON schemas, or the same as JSON text; null: none."""
    template_kwargs_column: str | None = "chat_template_kwargs"
    """Optional column with further variables for the chat template, an object or the same as JSON text; null: none."""

    def _problems(self) -> list[str]:
        values, keys = field_values(self), (*self.column_keys, "tools_column", "template_kwargs_column")
        return RowsDataConfig._problems(self) + distinct_names("data", {key: values[key] for key in keys})

    @property
    def column_keys(self) -> tuple[str, ...]:
        """Keys of the columns that are read: those of pairs, or of labeled answers."""
        answers = ("chosen_column", "rejected_column")
        if self.label_column is not None:
            answers = ("completion_column", "label_column")
        return ("prompt_column", "system_column", *answers)


@dataclass(kw_only=True, slots=True)
class ChatDataConfig(RowsDataConfig):
    """One conversation per row: a list of messages, passed to the chat template with all their keys. All assistant
    turns (text, tool calls, reasoning) have a loss, except messages with `train: false` or `weight: 0`."""

    kind: DataKind = DataKind.chat
    """chat."""
    messages_column: str = "messages"
    """Column that holds the list of messages."""
    role_key: str = "role"
    """Message key that holds the role (ShareGPT: from)."""
    content_key: str = "content"
    """Message key that holds the text (ShareGPT: value)."""
    system_role: str = "system"
    """Value of role_key in system messages."""
    user_role: str = "user"
    """Value of role_key in user messages (ShareGPT: human)."""
    assistant_role: str = "assistant"
    """Value of role_key in assistant messages (ShareGPT: gpt)."""
    tool_role: str = "tool"
    """Value of role_key in messages with the result of a tool call."""
    tools_column: str | None = "tools"
    """Optional column with the tools of a conversation: a list of JSON schemas, or the same as JSON text; null:
    none."""
    template_kwargs_column: str | None = "chat_template_kwargs"
    """Optional column with further variables for the chat template: an object such as {"enable_thinking": false}, or
    the same as JSON text; null: none."""
    train_on: TrainOn = TrainOn.all
    """Turns with a loss: all, or only the last, which is all that the assistant wrote after the last user message
    before it: calls of tools, and the answer after their results. Messages with `train: false` have none in both."""

    def _problems(self) -> list[str]:
        keys = {"role_key": self.role_key, "content_key": self.content_key}
        roles = {
            "system_role": self.system_role,
            "user_role": self.user_role,
            "assistant_role": self.assistant_role,
            "tool_role": self.tool_role,
        }
        columns = {
            "messages_column": self.messages_column,
            "tools_column": self.tools_column,
            "template_kwargs_column": self.template_kwargs_column,
        }
        return [
            *RowsDataConfig._problems(self),
            *distinct_names("data", columns),
            *distinct_names("data", keys),
            *distinct_names("data", roles),
        ]


@dataclass(kw_only=True, slots=True)
class TextDataConfig(RowsDataConfig):
    """Plain documents, cut into samples of seq_len tokens. Every token except the first of a document has a loss."""

    kind: DataKind = DataKind.text
    """text."""
    text_column: str = "text"
    """Column that holds the text of a document. A .txt file is one document, in a folder only if it has no
    files of rows; path=python:stdlib reads the source of Python's standard library."""

    def _problems(self) -> list[str]:
        problems = RowsDataConfig._problems(self) + distinct_names("data", {"text_column": self.text_column})
        if self.overlong is not Overlong.truncate:
            problems.append(
                f"data.overlong={self.overlong}: documents are cut into samples of training.seq_len tokens, so none "
                "is longer; remove data.overlong"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class TokensDataConfig(DataConfig):
    """Token store: shards of token ids that a manifest lists, in the format of Meshbook, Megatron, nanoGPT, OLMo or
    datatrove. A row is seq_len consecutive tokens of a shard and predicts the token after each. Batch sizes and sample
    limits count rows. With pack=false, tokens attend to earlier documents of their row. cache is used only for parts of
    a store behind a URL: nothing is tokenized."""

    kind: DataKind = DataKind.tokens
    """tokens."""
    path: str
    """Folder of the store, or its manifest.json, or a URL of either (s3://, gs://, az://, hf://)."""
    eval_path: str | None = None
    """Folder of a store with the held-out rows; null: hold out `eval_fraction` of path, in chunks of up to 16 rows at
    equal distances."""
    block_rows: int = 256
    """Rows of a block, which are next to each other on disk. An epoch permutes the blocks, and then the rows of each
    `window_blocks` blocks. 1: shuffle all rows, which reads a random place for each row."""
    window_blocks: int = 256
    """Blocks whose rows are shuffled together, at least 1."""
    cache_gib: float = 64
    """GiB on each node for parts of a store behind a URL, in `cache`; those not used for longest are deleted. Should
    hold the rows of several windows."""

    def _problems(self) -> list[str]:
        problems = [
            *DataConfig._problems(self),
            *at_least("data.block_rows", self.block_rows, 1),
            *at_least("data.window_blocks", self.window_blocks, 1),
            *above("data.cache_gib", self.cache_gib, 0),
            *self._object_problems({"path": self.path, "eval_path": self.eval_path}),
        ]
        for key, place in (("path", self.path), ("eval_path", self.eval_path)):
            if place == "":
                problems.append(f"data.{key}='': is empty; set data.{key} to the folder of a token store")
        if self.eval_split is not None:
            problems.append(
                f"data.eval_split={self.eval_split}: a token store has no splits; set data.eval_path to another store, "
                "or data.eval_fraction"
            )
        if self.overlong is not Overlong.truncate:
            problems.append(
                f"data.overlong={self.overlong}: rows are cut out of the store with training.seq_len tokens, so none "
                "is longer; remove data.overlong"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class CustomDataConfig(DataConfig):
    """Your own function factory(tokenizer, seq_len, split), which returns a sequence of components.data.Example."""

    kind: DataKind = DataKind.custom
    """custom."""
    factory: str
    """Import path of the function, MODULE:FUNCTION, such as my_package.my_data:build."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        module, _, function = self.factory.partition(":")
        if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            problems.append(f"data.factory={self.factory}: must be module:function, such as my_package.my_data:build")
        return problems


_OF_A_SOURCE = ("split", "eval_split", "eval_fraction", "max_samples", "max_eval_samples", "overlong")


@dataclass(kw_only=True, slots=True)
class MixtureDataConfig(DataConfig):
    """Several sources, each an option of conf/data/ under a name that you choose, sampled row by row by weight."""

    kind: DataKind = DataKind.mixture
    """mixture."""
    sources: dict[str, DataConfig] = field(default_factory=dict)
    """Sources by name. Add one with +data@data.sources.NAME=OPTION; set its keys as data.sources.NAME.KEY."""
    stages: list[StageConfig] = field(default_factory=list)
    """Stages of one run: [{until_step: 8000, weights: {web: 0.9, code: 0.1}}, {weights: {code: 1}, lr_ratio: 0}].
    until_step: last step of the stage, none in the last stage; weights: shares of the rows, where a source that is not
    named is not drawn ({}: the sources' own weights); seq_len: tokens to which rows are cut, a divisor of
    training.seq_len; lr_ratio: learning rate of the stage's last step as a fraction of optimizer.lr, reached linearly,
    with optimizer.schedule=constant. []: the same in every step."""

    def _problems(self) -> list[str]:
        problems = DataConfig._problems(self)
        if not self.sources:
            problems.append("data.sources={}: a mixture needs sources; add each as +data@data.sources.NAME=OPTION")
        problems += [
            f"data.{key}={value}: must be set per source of a mixture; set data.sources.NAME.{key}"
            for key, value in _changed(self, _OF_A_SOURCE)
        ]
        for name, source in self.sources.items():
            problems += self._problems_of(f"data.sources.{name}", source)
        return problems + stage_problems(self.stages, {name: source.weight for name, source in self.sources.items()})

    def _problems_of(self, key: str, source: DataConfig) -> list[str]:
        """Return the problems of the source at `key` that concern the mixture as a whole."""
        problems = [
            f"{key}.cache={value}: all sources share the cache of the mixture; set data.cache instead"
            for _, value in _changed(source, ["cache"])
        ]
        problems += [
            f"{key}.balance={value}: rows of all sources are dealt together; set data.balance instead"
            for _, value in _changed(source, ["balance"])
        ]
        paths = (source.path, source.eval_path) if isinstance(source, RowsDataConfig | TokensDataConfig) else ()
        problems += [
            f"data.cache=null: objects of {path}, which {key} reads, are copied to it; set data.cache to a folder"
            for path in paths
            if self.cache is None and path is not None and is_url(path)
        ]
        if source.pack and not self.pack:
            problems.append(
                f"{key}.pack=true: either all sources are packed or none; set it to false, or set data.pack=true"
            )
        return problems


def _changed(cfg: DataConfig, keys: Iterable[str]) -> list[tuple[str, object]]:
    """Return the given keys of `DataConfig` whose value differs from the default, with their values."""
    defaults = {each.name: each.default for each in fields(DataConfig)}
    values = field_values(cfg)
    return [(key, values[key]) for key in keys if values[key] != defaults[key]]
