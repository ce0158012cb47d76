"""JSON and YAML with limits, and checks of templates, for files and objects that a user, another program or an object
store can change."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

LARGEST = 1 << 28
"""Most bytes of a JSON file that is read whole, 256 MiB; far above any index of weights or manifest."""
DEEPEST = 200
"""Most lists and objects within one another; walking and writing the value stays far below Python's recursion limit."""
_TOO_DEEP = f"it nests more than {DEEPEST} lists and objects"
_MAX_VALUES = 100_000
"""Maximum number of values of a document with its aliases expanded; a config has a few hundred."""
_MAX_DEPTH = 100
"""Maximum nesting depth of collections."""
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for anything else, with the reason as a sentence.

    Refuses what the json module accepts or reports with another error: deep nesting, bytes that are not UTF-8, and
    halves of surrogate pairs, which no file name, terminal or UTF-8 file can hold.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(decoded)
        if isinstance(text, str) or "\\ud" in decoded.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except UnicodeError as error:
        raise ValueError(f"it cannot be read as UTF-8 text: {error}") from error
    if decoded.count("[") + decoded.count("{") > DEEPEST:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError for a value that nests more than DEEPEST lists and objects."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            nested
            for each in level
            if isinstance(each, list | dict)
            for nested in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(_TOO_DEEP)


def load_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises OSError for what is no regular file, and ValueError like `parse_json`."""
    return parse_json(read_regular(path, LARGEST))


def read_regular(path: Path, largest: int | None = None, count: int = -1) -> bytes:
    """Return the content of a regular file, or its first `count` bytes.

    Raises OSError for a pipe or a device, whose content may never end, and for a file of more than `largest` bytes.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if largest is not None and status.st_size > largest:
            raise OSError(errno.EFBIG, f"Larger than {largest:,} bytes", str(path))
        return file.read(count)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but like omegaconf it reads 1e-4 as a number and dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (typed so by PyYAML)
        first: [
            resolver
            for resolver in resolvers
            if resolver[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node. Raises yaml.YAMLError for a key that is written twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"found the key {key.value} twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class YamlLimitError(yaml.YAMLError):
    """Document that exceeds the limits above, or contains a recursive alias."""


def load_yaml(text: str) -> Any:
    """Parse YAML text like omegaconf, within the limits above. Raises yaml.YAMLError and nothing else."""
    if not isinstance(text, str):
        raise yaml.YAMLError(f"not a text but {text!r:.60}")
    check_expansion(text)
    try:
        return yaml.load(text, Loader)
    except (ValueError, OverflowError) as error:  # an integer of 5,000 digits
        raise yaml.YAMLError(str(error)) from error


def check_expansion(text: str) -> None:
    """Reject text that exceeds the limits with its aliases expanded, by the parser's events, without building objects.

    PyYAML expands an alias for free, by sharing the object, but copying or printing the result visits every value: ten
    lines of ten aliases each expand to 10 billion.

    Raises yaml.YAMLError.
    """
    sizes: dict[str, int | None] = {}  # by anchor; None: the collection is still open
    open_collections: list[tuple[str | None, int]] = [(None, 0)]  # anchor, values so far
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            if event.anchor is not None:
                sizes[event.anchor] = None
            open_collections.append((event.anchor, 1))
            if len(open_collections) > _MAX_DEPTH:
                raise YamlLimitError(f"collections are nested more than {_MAX_DEPTH} deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_collections.pop()
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            anchored = sizes.get(event.anchor, 1)  # an undefined anchor is reported by yaml.safe_load
            if anchored is None:
                raise YamlLimitError(f"the alias *{event.anchor} is inside its own anchor")
            size = anchored
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        else:
            continue
        parent, so_far = open_collections[-1]
        if so_far + size > _MAX_VALUES:
            raise YamlLimitError(f"more than {_MAX_VALUES:,} values with aliases expanded")
        open_collections[-1] = (parent, so_far + size)


def is_template(text: str) -> bool:
    """Return whether a text has expressions or statements of Jinja."""
    return "{{" in text or "{%" in text


def check_jinja(text: str) -> None:
    """Raise ValueError for a text that is no chat template, with the reason as a sentence."""
    import jinja2  # a process without such a text does not load it

    if not is_template(text):
        raise ValueError("it has neither {{ ... }} nor {% ... %}")
    if text.lstrip().startswith('{"'):
        raise ValueError("it is JSON; write the text of its chat_template to a file")
    try:
        # transformers adds the tag `generation`, which marks answers.
        plain = re.sub(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
