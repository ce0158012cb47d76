"""Hydra's and omegaconf's errors in our words: the value, the rule, the key, and the nearest name that exists."""

from __future__ import annotations

import difflib
import re

VALUE_RULE = re.compile(r"Value '(?P<value>.*?)' of type '(?P<type>.*?)' could not be converted to (?P<wanted>\w+)")
ENUM_RULE = re.compile(r"Invalid value '(?P<value>.*?)', expected one of \[(?P<choices>.*?)\]")
OPTION_RULE = re.compile(r"Could not find '(?P<group>[^']*)/(?P<option>[^']*)'")


def unknown_key(key: str, known: list[str]) -> str:
    """Return the sentence for a key that does not exist."""
    return f"{key}: no such key{did_you_mean(key, known)}"


def did_you_mean(name: str, known: list[str]) -> str:
    """Return `; did you mean X?` for the nearest of `known`, or nothing."""
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or same_leaf[:1]
    return f"; did you mean {nearest[0]}?" if nearest else ""


def explain_value(error: Exception) -> str:
    """Return the rule that a value broke, in one line."""
    text = str(error.__cause__ or error) if "rror merging" in str(error) else str(error)
    if found := VALUE_RULE.search(text):
        wanted = {"Integer": "a whole number", "Float": "a number", "Bool": "true or false"}
        return f"must be {wanted.get(found['wanted'], found['wanted'])}, not {found['value']!r}"
    if found := ENUM_RULE.search(text):
        choices = found["choices"].split(", ")
        return f"must be one of {', '.join(choices)}{did_you_mean(found['value'], choices)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def explain_override(override: str, error: Exception, keys: list[str], groups: dict[str, list[str]]) -> str:
    """Return one sentence for an override that Hydra refused.

    Args:
        override: As typed, for example `training.max_step=3`.
        error: What Hydra raised.
        keys: Every dotted key of the schema.
        groups: Options of every config group.
    """
    text = f"{error} {error.__cause__ or ''}"
    key, _, value = override.lstrip("+~").partition("=")
    key = key.partition("@")[0]
    if found := OPTION_RULE.search(text):
        options = groups.get(found["group"], [])
        if not options:
            return unknown_key(key, [*keys, *groups])
        listed = ", ".join(options)
        return f"{key}={value}: no such option{did_you_mean(found['option'], options)} (there are: {listed})"
    if "Could not override" in text or "Could not append" in text or "not in" in text:
        return unknown_key(key, [*keys, *groups]) if key not in keys else f"{override}: {explain_value(error)}"
    if "Multiple values for" in text or "already" in text:
        return f"{override}: write {key}={value} without the plus"
    return f"{override}: {explain_value(error)}"
