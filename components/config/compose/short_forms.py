"""Overrides as Hydra's grammar needs them: short forms as options with their path, and texts in quotes.

data=mine.jsonl         data=jsonl data.path=mine.jsonl, or the option of the recipe that has the columns of the file
model=Qwen/Qwen3-0.6B   model=smollm2_135m model.path=Qwen/Qwen3-0.6B; also a folder, a .gguf file, package:NAME/FILE

An existing option takes precedence over a file of its name. Sources of a mixture (+data@data.sources.NAME=FILE) have
the same forms. Hydra would read run.dir=2024_06_15 as a number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from components.config.compose.explain import override_parts
from components.config.compose.sources import option_texts, parsed
from components.config.compose.typed import Types, alternatives, below, is_class, is_text, literal, types_at
from components.config.rules import accepted_kinds
from components.config.schema.data import DataKind
from components.config.schema.recipes import EvaluateConfig, PretrainConfig, RecipeConfig
from components.data.sources.files import Location, columns_of
from components.data.sources.split_files import files_of_split
from components.protocol.errors import ConfigError
from components.storage.object_store import is_url

_ANY_MODEL = "smollm2_135m"
"""Option that sets nothing but a path and sizes, which are dropped with another path."""
_READ_A_PATH = {
    DataKind.labels: "labels",
    DataKind.preferences: "preferences",
    DataKind.sft: "jsonl",
    DataKind.chat: "chat_jsonl",
    DataKind.text: "text",
    DataKind.tokens: "tokens",
}
"""Options of conf/data without a path of their own, by kind; a recipe that accepts several takes the first."""
_COLUMNS = {
    "jsonl": {"prompt", "response"},
    "chat_jsonl": {"messages"},
    "alpaca": {"instruction", "input", "output"},
    "text": {"text"},
}
"""Options -> columns of their rows; the first fitting one is chosen where a recipe trains on all of them."""
_OF_ROWS = re.compile(r".*\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.(gz|zst))?", re.IGNORECASE | re.DOTALL)
_OF_TEXT = re.compile(r".*\.txt(\.(gz|zst))?", re.IGNORECASE | re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_./][\w./:@+%-]*", re.ASCII)
"""Path that Hydra's grammar reads as it is."""
_PAGE = re.compile(
    r"(?:https://huggingface\.co/(?:datasets/)?|hf://)(?P<name>(?!datasets/)[\w.-]+/[\w.-]+)"
    r"(?:/(?:resolve|blob)/[^/]+/(?P<file>.+))?/?"
)
"""Page of a model or dataset on the hub, or of a file of a dataset."""
_NO_PATH = re.compile(r"""[]["'{}$,]""")
"""Characters of a value with another meaning than a path, unless it names an existing file."""
_MOST_FILES = 1000  # of a folder, of which the formats are read
_NUMBER_OR_BOOLEAN = re.compile(r"[+-]?(?:\d[\w.+-]*|\.\d[\w+-]*|inf|nan)|true|false", re.IGNORECASE)
"""Text that Hydra may read as a number or a boolean."""
_PARTS = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\$\{(?:[^{}]|\{[^{}]*\})*\}|\\.|[][{}(),:]|[^][{}(),:"'$\\]+|."""
)
"""Parts of the value of an override: quoted text, interpolation, escaped character, delimiter, other text."""
_CHOOSING = ("", "choice", "shuffle", "sort")
"""Functions of Hydra's grammar whose arguments are values of the key; "": parentheses without a function."""


def long_forms(overrides: Sequence[str], schema: type[RecipeConfig], folders: Sequence[Path]) -> list[str]:
    """Return the overrides with short forms replaced, except those that `explain_short_form` reports."""
    expanded: list[str] = []
    for override in overrides:
        path, section = _short_path(override, folders), _section(override)
        option = None if path is None else _option(override, path, overrides, schema, folders)
        if path is None or option is None or _other_path(override, overrides):
            expanded.append(override)
            continue
        if not any(_section(each) == section and _names_option(each, folders) for each in overrides):
            head = override.partition("=")[0]
            expanded.append(f"{head if '@' in head else section}={option}")
        expanded.append(f"{section}.path={path if _PLAIN.fullmatch(path) else _quoted(path)}")
    return expanded


def explain_short_form(override: str, overrides: Sequence[str], folders: Sequence[Path]) -> str | None:
    """Return the message for a short form that `long_forms` does not replace; None for another override."""
    path, section = _short_path(override, folders), _section(override)
    if path is None:
        return None
    shown = f"{override.partition('=')[0]}={path}"
    if other := _other_path(override, overrides):
        return f"{shown}: {other} sets a path, too; remove one of them"
    if _is_hub_name(path):
        head = shown.partition("=")[0]
        with_path = [f"{head}={option} {section}.path={path}" for option in ("jsonl", "chat_jsonl", "text")]
        return (
            f"{shown}: the columns of a hub dataset are unknown before it is loaded; write {with_path[0]} for prompts "
            f"and responses, {with_path[1]} for messages, or {with_path[2]} for plain text"
        )
    return f"{shown}: this recipe reads no file; choose one of its options of data"


def _short_path(override: str, folders: Sequence[Path]) -> str | None:
    """Return the path or hub name that an override has in place of an option of data or model; None if it has none.

    Text that names an existing file is that file, whatever it means in Hydra's grammar.
    """
    head, _, text = override.partition("=")
    group, section = override_parts(override)[0], _section(override)
    is_source = group == "data" and section.startswith("data.sources.")
    if group not in ("data", "model") or not (section == group or is_source) or head.startswith("~"):
        return None
    if _names_option(override, folders):
        return None
    if _exists(text):
        return str(literal(text))
    try:
        given = parsed(f"{group}={text}")
        value = None if given.is_sweep_override() else given.value()
    except HydraException:
        value = None if _NO_PATH.search(text) else text
    if not isinstance(value, str) or not value.strip():
        return None
    value = _without_page(value)
    if group == "model":
        is_path = re.search(r"[/~]|\.gguf$|^package:", value)
    else:
        is_path = re.search("[/~]", value) or _OF_ROWS.fullmatch(value) or _OF_TEXT.fullmatch(value)
    return value if is_path or _exists(value) else None


def _without_page(value: str) -> str:
    """Return the name of a hub model or dataset, or the hf:// URL of a file, for the address of its page."""
    page = _PAGE.fullmatch(value)
    if page is None:
        return value
    return f"hf://datasets/{page['name']}/{page['file']}" if page["file"] else page["name"]


def settings_of_word(word: str, schema: type[RecipeConfig], folders: Sequence[Path]) -> list[str]:
    """Return the settings that a file, a folder or a hub name without a key may be meant for."""
    if _short_path(f"data={word}", folders) is None or word.endswith((".yaml", ".yml")):
        return []
    if _exists(f"{word}/config.yaml"):  # of a run
        return [f"run={word}" if issubclass(schema, EvaluateConfig) else f"run.dir={word}"]
    if _exists(f"{word}/config.json") or word.endswith(".gguf"):
        return [f"model={word}"]
    return [f"model={word}", f"data={word}"] if _is_hub_name(word) else [f"data={word}"]


def with_home(override: str) -> str:
    """Return an override of data or model with ~/ expanded in a list of paths, which Hydra cannot parse."""
    key, _, text = override.partition("=")
    if override_parts(override)[0] not in ("data", "model") or "," not in text or _exists(text):
        return override
    return f"{key}={re.sub(r'(?<![^,])~/', f'{Path.home()}/', text)}"


def _option(
    override: str, path: str, overrides: Sequence[str], schema: type[RecipeConfig], folders: Sequence[Path]
) -> str | None:
    """Return the option that reads a path; None if the recipe has none, or several that may."""
    if override_parts(override)[0] == "model":
        return _ANY_MODEL
    kinds = accepted_kinds(schema, "data")
    if DataKind.tokens in kinds and _is_token_store(path):
        return _READ_A_PATH[DataKind.tokens]
    if DataKind.text in kinds and (issubclass(schema, PretrainConfig) or _holds_text(path)):
        return _READ_A_PATH[DataKind.text]
    if "objective=reward" in overrides:
        kinds = [kind for kind in kinds if kind != DataKind.labels]
    kind = next((kind for kind in _READ_A_PATH if kind in kinds), None)
    if kind is DataKind.sft and (columns := _columns(path)):
        return next((option for option, names in _COLUMNS.items() if names <= columns), _READ_A_PATH[kind])
    if kind is DataKind.sft and DataKind.chat in kinds and _is_hub_name(path):
        stated = re.compile(rf"^path: {re.escape(path)}$", re.MULTILINE)
        options = {name: text for folder in folders for name, text in option_texts([folder], "data").items()}
        return next((name for name, text in options.items() if stated.search(text)), None)
    return None if kind is None else _READ_A_PATH[kind]


def _columns(path: str) -> set[str]:
    """Return the columns of a local file or folder; empty if they cannot be read, or if it holds labeled texts."""
    if is_url(path) or not _exists(path):
        return set()
    with suppress(ConfigError, OSError, ImportError):
        columns = set(columns_of(files_of_split(Location("data.path", path, "train"))[0]))
        return set() if {"text", "label"} <= columns else columns
    return set()


def _is_token_store(path: str) -> bool:
    return Path(path).name == "manifest.json" or _exists(f"{path}/manifest.json")


def _holds_text(path: str) -> bool:
    """Return whether a path is a .txt file, or a folder of them without files of rows."""
    folder = Path(os.path.expanduser(path))
    if is_url(path) or not folder.is_dir():
        return _OF_TEXT.fullmatch(path) is not None
    names = [each.name for each in islice(folder.rglob("*"), _MOST_FILES)]
    return any(map(_OF_TEXT.fullmatch, names)) and not any(map(_OF_ROWS.fullmatch, names))


def _is_hub_name(path: str) -> bool:
    is_file = _OF_ROWS.fullmatch(path) or _OF_TEXT.fullmatch(path) or _exists(path)
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not is_file


def _exists(text: str) -> bool:
    try:
        return bool(text.strip(" ./")) and os.path.exists(os.path.expanduser(text))
    except ValueError:  # a null character
        return False


def _section(override: str) -> str:
    """Return the section that the option of an override sets: data, or data.sources.NAME."""
    group, _, package = override.partition("=")[0].lstrip("+~").strip().partition("@")
    return package or group


def _names_option(override: str, folders: Sequence[Path]) -> bool:
    group, _, value = override_parts(override)
    return any(_exists(str(folder / group / f"{value}.yaml")) for folder in folders)


def _other_path(override: str, overrides: Sequence[str]) -> str | None:
    """Return an override that sets the path of the same section by its key."""
    key = f"{_section(override)}.path"
    return next((each for each in overrides if override_parts(each)[0] == key), None)


def _quoted(path: str) -> str:
    return QuotedString(text=path, quote=Quote.single).with_quotes()


def override_with_texts(override: str, schema: type) -> str:
    """Return an override with quotes around the texts that Hydra would read as numbers or booleans."""
    key, assigned, value = override_parts(override)
    if not assigned or override.startswith("~") or not (kinds := types_at(schema, key)):
        return override
    return f"{override.partition('=')[0]}={_with_quotes(value, kinds)}"


@dataclass
class _Container:
    """Open bracket in the value of an override."""

    opening: str
    kinds: Types
    """Types of the container."""
    entry: Types | None
    """Types of the current entry; None before the colon of a dict's entry."""


def _with_quotes(value: str, kinds: Types) -> str:
    """Return the value of an override, or several separated by commas, with quotes around texts."""
    written, scalar = [], ""
    open_containers = [_Container("", kinds, kinds)]
    for part in _PARTS.findall(value):
        inside = open_containers[-1]
        if part not in tuple("[]{}(),:") or (part == ":" and inside.entry is not None):
            scalar += part
            continue
        if part == ":":
            inside.entry = below(inside.kinds, scalar.strip())
        elif part in "[{(":
            current = inside.entry or ()
            entry = {"[": below(current, ""), "{": None, "(": current if scalar.strip() in _CHOOSING else ()}
            open_containers.append(_Container(part, current, entry[part]))
        else:
            scalar = _quoted_text(scalar, inside.entry or ())
            if part == "," and inside.opening == "{":
                inside.entry = None
            elif part != "," and len(open_containers) > 1:
                open_containers.pop()
        written += [scalar, part]
        scalar = ""
    return "".join(written) + _quoted_text(scalar, open_containers[-1].entry or ())


def _quoted_text(scalar: str, kinds: Types) -> str:
    text = scalar.strip()
    texts = tuple(alternative for alternative in alternatives(kinds) if not is_class(alternative, Enum))
    if not _NUMBER_OR_BOOLEAN.fullmatch(text) or not is_text(text, texts):
        return scalar
    return scalar.rstrip().replace(text, f'"{text}"')
