"""Patterns of the error messages of Hydra, omegaconf and PyYAML: the only place that depends on their wording.

These libraries raise few exception classes and put the facts (key, file, rule) only into the message. Each pattern
matches one message. `tests/config/test_hydra_messages.py` provokes all of them with the installed versions, so that a
changed wording fails there by the name of the pattern.
"""

from __future__ import annotations

import re

# omegaconf, about a value
NOT_CONVERTIBLE = re.compile(r"could not be converted to (?P<wanted>\w+)")
NOT_A_BOOL = re.compile(r"is not a valid bool")
NOT_A_CHOICE = re.compile(r"expected one of \[(?P<choices>.*?)\]")
GIVEN = re.compile(r"Invalid value '(?P<value>.*?)'")
"""Value that is not one of the choices."""
NULL_TEXT = re.compile(r"is not Optional\s.*\s+reference_type=Dict\[str, str\]|NoneType is not a subclass of str")
NOT_OPTIONAL = re.compile(r"is not Optional|Incompatible value 'None'")
NOT_A_LIST = re.compile(r"is not a ListConfig")
NOT_A_SECTION = re.compile(r"is not a subclass of|Cannot merge|Cannot assign")
NOT_A_SINGLE_VALUE = re.compile(r"is not a valid input for|of type '(dict|list)'|Cannot convert '(dict|list)'")

# omegaconf, about a key
FULL_KEY = re.compile(r"full_key: (?P<key>\S+)")
NULL_KEY = re.compile(r"Incompatible key type 'NoneType'")
KEY_IS_NO_TEXT = re.compile(r"Key (?P<name>\S+) \(\w+\) is incompatible with \(str\)")
UNKNOWN_KEY = re.compile(r"Key '(?P<leaf>[^']*)' not in '(?P<schema>[^']*)'")

# Hydra, about an override
NO_DELETION = re.compile(r"does not support deletion")
MERGING = re.compile(r"Error merging")
"""Generic message; `__cause__` holds the details."""
ALREADY_THERE = re.compile(r"Multiple values for|already at")
SECOND_OPTION = re.compile(r"Multiple values for .* use 'override (?P<group>[^:@]+)[^:]*: (?P<option>[^']*)'")
NOTHING_TO_OVERRIDE = re.compile(r"Could not override")
NO_SUCH_KEY = re.compile(r"Could not (override|append|delete)")
NOT_AN_OPTION = re.compile(r"Config group override must be")

# Hydra, about a file
IN_FILE = re.compile(r"In '(?P<file>[^']*)': \w+ raised while composing config:\n(?P<what>.*)", re.DOTALL)
NO_OPTION = re.compile(r"(In '(?P<file>[^']*)': )?Could not (find|load) '(?P<group>[^']*)/(?P<option>[^']*)'")
NO_GROUP = re.compile(r"(In '(?P<file>[^']*)': )?Could not override '(?P<group>[^'@]*)")
REJECTED_KIND = re.compile(
    r"In 'schema/(?P<section>\w+)/(?P<kind>\w+)': ValidationError .*is not a subclass of", re.DOTALL
)
"""Option of a kind that the recipe's config does not accept."""

# PyYAML
NOT_YAML = re.compile(
    r'(?P<what>expected .*|found .*|could not .*|mapping values .*)\n\s*in "(?P<file>.*)", line (?P<line>\d+)'
)
