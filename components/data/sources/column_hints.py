"""The settings that fit a source's columns, for the message that a configured column does not exist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from components.config.schema.checks import field_values
from components.config.schema.data import (
    ChatDataConfig,
    LabelsDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
)

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
_ROLES = {"user_role": ("user", "human"), "assistant_role": ("assistant", "gpt", "bot", "model")}
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
    if {"prompt", "response", "label"} <= found.keys() and all(isinstance(each, bool) for each in labels):
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
    for name, usual in _ROLES.items():
        present = [role for role in usual if role in roles]
        settings |= {name: present[0]} if present else {}
    return settings


def _label_settings(labels: Sequence[Any]) -> dict[str, object]:
    """Return the number or the names of the labels in the first rows."""
    present = [each for each in labels if each is not None]
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
