"""YAML of files that a user or another program wrote: parsed only after its expanded size is known."""

from __future__ import annotations

from typing import Any

import yaml

MAX_VALUES = 100_000
"""Values a document may have once its aliases are expanded; a config has a few hundred."""
MAX_DEPTH = 100
"""Collections that may be nested in one another."""


class YamlLimitError(yaml.YAMLError):
    """A document that expands to more than the limits above, or that cannot be expanded at all."""


def load_yaml(text: str) -> Any:
    """Return what YAML text holds, as `yaml.safe_load` does. Raises yaml.YAMLError, and nothing else, if it cannot."""
    check_expansion(text)
    try:
        return yaml.safe_load(text)
    except (ValueError, OverflowError) as error:  # an integer of 5,000 digits, the 99th of a month
        raise yaml.YAMLError(str(error)) from error


def check_expansion(text: str) -> None:
    """Reject text whose aliases expand without reasonable bound; the parser's events suffice, nothing is built.

    An alias costs PyYAML nothing, since it shares the object. Whoever copies or prints the result pays for every value:
    ten lines of ten aliases each are 10 billion.

    Raises yaml.YAMLError.
    """
    sizes: dict[str, int | None] = {}  # by anchor; None: not complete yet
    open_collections: list[tuple[str | None, int]] = [(None, 0)]  # anchor, values so far
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            if event.anchor is not None:
                sizes[event.anchor] = None
            open_collections.append((event.anchor, 1))
            if len(open_collections) > MAX_DEPTH:
                raise YamlLimitError(f"more than {MAX_DEPTH} collections are nested in one another")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_collections.pop()
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            known = sizes.get(event.anchor, 1)  # an unknown anchor is an error of its own
            if known is None:
                raise YamlLimitError(f"the alias *{event.anchor} is inside of what it stands for")
            size = known
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        else:
            continue
        parent, so_far = open_collections[-1]
        if so_far + size > MAX_VALUES:
            raise YamlLimitError(f"more than {MAX_VALUES:,} values, with its aliases expanded")
        open_collections[-1] = (parent, so_far + size)
