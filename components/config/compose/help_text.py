"""Help texts: what is known of each key, `--help`, and the entries of which pages and `meshbook help` consist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Union, get_args, get_origin

from components.config.compose.explain import choices_of, written
from components.config.compose.frozen import resolve
from components.config.compose.sources import (
    CONF,
    ConfigFile,
    Request,
    kind_of_option,
    merged,
    nested,
    option_texts,
    read_files,
    value_at,
)
from components.config.compose.typed import UNSET, section_class, with_defaults
from components.config.kinds import KINDS, kinds_of, type_hints
from components.config.schema import recipes as schemas
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import load_yaml
from components.terminal import fit

_fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
_OPTIONS = """\
-m, --multirun       run a sweep: a value may be a list, KEY=a,b
--cfg job            print the composed config and exit; with --resolve, without references
--config-dir FOLDER  search this folder for options, too
--quiet              print only where the run is, its summary, and errors: logging.quiet=true
--help [SECTION]     print this text, or the keys of a section, with the values that other arguments set; all: of all
"""
_MOST_LINES, _MOST_KEYS = 60, 20
"""Limits of the text of --help without a section."""
_MOST_USED = """
    model.path data.path teacher.path evaluation.checkpoint training.max_steps training.epochs
    training.global_batch_size training.micro_batch_size training.seq_len training.eval_every evaluation.seq_len
    optimizer.lr optimizer.warmup_steps optimizer.schedule objective.beta peft.rank parallelism.tp parallelism.pp
    parallelism.cp parallelism.activation_checkpointing checkpoint.every run.dir run.resume cluster.nodes
    cluster.procs_per_node logging.wandb.mode model.attention data.pack run.seed generation.prompts evaluation.tasks
"""
"""Keys of all recipes, of which a recipe shows the first that it has."""
RECIPES = {
    "finetune": schemas.FinetuneConfig,
    "pretrain": schemas.PretrainConfig,
    "dpo": schemas.DpoConfig,
    "grpo": schemas.GrpoConfig,
    "distill": schemas.DistillConfig,
    "classify": schemas.ClassifyConfig,
    "evaluate": schemas.EvaluateConfig,
    "teacher": schemas.StoreTeacherConfig,
    "answer": schemas.AnswerPromptsConfig,
}
"""Name of a config (conf/NAME.yaml) -> its class."""
_PLAIN_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


def recipe_help(
    description: str,
    schema: type,
    groups: Mapping[str, list[str]],
    values: Mapping[str, Any],
    width: int,
    topics: Sequence[str] = (),
) -> str:
    """Return the help of a recipe in lines of at most `width` columns: an overview, sections, or everything.

    Args:
        description: Docstring of the recipe.
        schema: Its config class.
        groups: Names of the options of each group.
        values: The values that this command sets.
        topics: Sections to describe; `all`: the whole text. None: an overview in at most 60 lines.

    Raises ConfigError for a topic that is no section.
    """
    hints = type_hints(schema)
    if unknown := [topic for topic in topics if topic not in (*hints, "all")]:
        raise ConfigError(f"--help {unknown[0]}: no such section; write one of {', '.join(hints)}, or all")
    if not topics:
        return _overview(description, hints, groups, values, width)
    parts = []
    if "all" in topics:
        parts += [
            f"{fit(description.strip(), width)}\n",
            "Options:\n\n" + fit(textwrap.indent(_OPTIONS, "  "), width),
            "Options of groups, GROUP=OPTION:\n",
            *(
                _fill(f"{group}: {', '.join(groups[group])}", width, subsequent_indent="    ")
                for group in sorted(groups)
            ),
            "\nKeys, KEY=VALUE, with the values of this command:",
        ]
    for name in hints if "all" in topics else topics:
        section, value = section_class(hints[name]), values.get(name)
        if section is not None and isinstance(value, Mapping):
            parts.append(section_help(name, {"": _class_of(section, value)}, width, values))
        else:  # a user's own key outside of sections, or null
            parts.append(f"\n{name}={written(value)}")
    return "\n".join(parts)


def _overview(
    description: str, hints: Mapping[str, Any], groups: Mapping[str, list[str]], values: Mapping[str, Any], width: int
) -> str:
    """Return the examples of a recipe, its options, its groups and its most used keys."""
    below = ["", "Options:", *fit(textwrap.indent(_OPTIONS, "  "), width).splitlines(), "", "Groups, GROUP=OPTION:"]
    for group in sorted(groups):
        names = f"  {group}: {', '.join(groups[group])}"
        more = f", ... ({len(groups[group])}, see meshbook help {group})"
        below.append(names if len(names) <= width else names[: width - len(more)].rpartition(",")[0] + more)
    below += ["", "Keys, KEY=VALUE (more: --help SECTION, --help all):"]
    keys: dict[str, Key] = {}
    for name, hint in hints.items():
        if (section := section_class(hint)) is not None and isinstance(values.get(name), Mapping):
            keys |= keys_of(_class_of(section, values[name]), name)
    for key in [each for each in _MOST_USED.split() if each in keys][:_MOST_KEYS]:
        meaning = re.split(r"[.;] | \(", " ".join(keys[key].doc.split()))[0].rstrip(".")
        line = f"  {f'{key}={_value(values, key)}':<40} {meaning}"
        below.append(line if len(line) <= width else f"{line[: width - 3].rstrip()}...")
    summary, _, rest = description.strip().partition("\n\n")
    above = fit(summary, width).splitlines()
    examples = rest.partition("\n\n")[0].splitlines()
    shown = [fit(example, width).splitlines() for example in examples]
    while shown and len(above) + 1 + sum(map(len, shown)) + len(below) > _MOST_LINES:
        shown.pop()
    return "\n".join([*above, *([""] if shown else []), *(line for each in shown for line in each), *below])


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with the value that a text states for it."""

    name: str
    value: str
    others: str
    """The values in other recipes, as a sentence; or ''."""
    key: Key


def section_entries(
    section: str, variants: Mapping[str, type], values: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield the keys of a section: those of every kind with the name "", then those of each kind with its name.

    Args:
        section: Name of the section.
        variants: Its classes by kind; one class without a kind has the name "".
        values: The composed config, to state its values instead of those of the recipes.
    """
    shared = shared_keys(variants, section)
    yield "", _entries(shared, "", values)
    for name, schema in variants.items() if len(variants) > 1 else ():
        own = {key: described for key, described in keys_of(schema, section).items() if key not in shared}
        yield name, _entries(own, name, values)


def _entries(keys: Mapping[str, Key], kind: str, values: Mapping[str, Any] | None) -> list[Entry]:
    found = []
    for name, key in keys.items():
        value, others = "", ""
        if key.type != "section":
            value, others = (_value(values, name), "") if values is not None else default_and_others(name, [kind], key)
        found.append(Entry(name, value, others, key))
    return found


def section_help(
    section: str, variants: Mapping[str, type], width: int, values: Mapping[str, Any] | None = None
) -> str:
    """Return `section_entries` as text."""
    lines = []
    for kind, entries in section_entries(section, variants, values):
        schema = variants.get(kind) or next(iter(variants.values()))
        title = f"{section}.kind={kind}: " if kind else f"{section}: "
        heading = f"{section}, all kinds:" if len(variants) > 1 and not kind else f"{title}{summary(schema)}".rstrip()
        lines += ["", _fill(heading, width, subsequent_indent="    ")]
        lines += [entry_text(entry, width) for entry in entries if entry.key.type != "section"]
    return "\n".join(lines)


def entry_text(entry: Entry, width: int, stated: Sequence[str] = ()) -> str:
    """Return the lines of a key: its value, or the lines `stated` in its place; its meaning, type and other values."""
    value = "" if entry.value == "required" else entry.value
    key = entry.key
    ending = "" if key.doc.endswith((".", "?")) or not key.doc else "."
    text = f"{' '.join(key.doc.split())}{ending} {key.type[:1].upper()}{key.type[1:]}. {entry.others}".strip()
    indent = " " * 6
    lines = [_fill(f"  {each}", width, subsequent_indent=indent) for each in stated or [f"{entry.name}={value}"]]
    return "\n".join([*lines, _fill(text, width, initial_indent=indent, subsequent_indent=indent)])


def _value(values: Mapping[str, Any], key: str) -> str:
    """Return a composed value as text; empty for a required one."""
    value = value_at(values, key)
    return "" if value == UNSET else written(value)


def _class_of(schema: type, values: Mapping[str, Any]) -> type:
    """Return the class of a section's values: that of their kind, if the section has kinds."""
    variants = variants_of([schema])
    return variants.get(str(values.get("kind")), next(iter(variants.values()))) if len(variants) > 1 else schema


@dataclass(frozen=True, slots=True)
class Key:
    """A config key: type, default, docstring."""

    type: str
    """Type in words, with the choices of an enumeration; "section" for keys that contain keys."""
    default: str
    """Default as it is written on a command line; "required" without one."""
    doc: str
    """Docstring of the field; empty without one, as a user's own field may be."""
    choices: tuple[str, ...] = ()
    """Its values, if they are true and false or those of an enumeration."""


@dataclass(frozen=True, slots=True)
class Default:
    """Value that a key has in recipes, unless an option or the command line sets it."""

    value: str
    source: str
    """What sets it: an option, conf/RECIPE.yaml, or nothing."""
    recipes: tuple[str, ...]


def recipe_defaults(key: str, of: Sequence[str] = ("",)) -> list[Default]:
    """Return the values of a key in the recipes.

    Args:
        of: Headings of `variants_of`: recipes whose section has another kind or class are left out; "": all recipes.
    """
    section = key.partition(".")[0]
    found: dict[tuple[str, str], list[str]] = {}
    for recipe, schema in RECIPES.items():
        values, files = _recipe_values(recipe)
        hint = section_class(type_hints(schema).get(section))
        if hint is None or key not in keys_of(_class_of(hint, values[section]), section):
            continue
        if not {"", str(values[section].get("kind")), hint.__name__}.isdisjoint(of):
            set_by = [file for file in files if value_at(nested(file.package, file.values), key) not in (None, UNSET)]
            source = set_by[-1].name.replace("/", "=") if set_by else ""
            source = "conf/RECIPE.yaml" if source == recipe else source
            found.setdefault((_value(values, key) or "required", source), []).append(recipe)
    return [Default(value, source, tuple(recipes)) for (value, source), recipes in found.items()]


def default_and_others(key: str, of: Sequence[str], described: Key) -> tuple[str, str]:
    """Return the value of a key in the first recipes that have it, and those in the others as a sentence, or ''.

    A kind that no recipe begins with has the values of its option, if it has one.
    """
    values: dict[str, list[str]] = {}
    for default in recipe_defaults(key, of):
        values.setdefault(default.value, []).extend(default.recipes)
    if not values:
        section, _, name = key.partition(".")
        texts = option_texts((CONF,), section)
        options = [option for option in texts if section in KINDS and kind_of_option(section, option, texts) == of[0]]
        stated = value_at(load_yaml(texts[options[0]]), name) if len(options) == 1 else None
        return (described.default if stated in (None, UNSET) else written(stated)), ""
    (first, _), *others = values.items()
    texts_of = [f"{value or repr(value)} in {', '.join(recipes)}" for value, recipes in others]
    return first, f"{'; '.join(texts_of)}." if texts_of else ""


@functools.cache
def _recipe_values(recipe: str) -> tuple[dict[str, Any], list[ConfigFile]]:
    """Return the values of a recipe's config without overrides, and the files that set them, without the user's."""
    files = read_files(Request(recipe, RECIPES[recipe], (CONF,), ()), ())
    files = [each for each in files if not each.name.startswith("local/")]
    values: dict[str, Any] = {}
    for file in files:
        values = merged(values, nested(file.package, file.values))
    return resolve(with_defaults(values, RECIPES[recipe]))[0], files


def file_of(recipe: str) -> str:
    """Return the path of the script that has the config conf/RECIPE.yaml."""
    return f"{'scripts' if recipe in ('teacher', 'answer') else 'recipes'}/{recipe}.py"


def sections() -> dict[str, list[type]]:
    """Return the sections, with the classes that the recipes annotate them with, the widest first."""
    found: dict[str, list[type]] = {}
    for schema in RECIPES.values():
        for name, hint in type_hints(schema).items():
            classes = found.setdefault(name, [])
            if hint not in classes:
                classes.append(hint)
    return {name: sorted(classes, key=lambda each: len(each.__mro__)) for name, classes in found.items()}


def recipes_with(section: str) -> list[str]:
    """Return the recipes whose config has a section."""
    return [name for name, schema in RECIPES.items() if section in type_hints(schema)]


@functools.cache
def keys_of(schema: type, prefix: str) -> dict[str, Key]:
    """Return the keys of a dataclass and of the dataclasses in it, by name."""
    keys: dict[str, Key] = {}
    docs, hints = _field_docs(schema), type_hints(schema)
    for field in dataclasses.fields(schema):
        name, hint = f"{prefix}.{field.name}", hints[field.name]
        doc = docs.get(field.name, "")
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys |= {name: Key("section", "", doc), **keys_of(hint, name)}
        else:
            keys[name] = Key(_describe_type(hint), _default_of(field), doc, choices_of(hint))
    return keys


def variants_of(classes: list[type]) -> dict[str, type]:
    """Return the classes of a section by heading: its kinds, or the classes that the recipes accept."""
    kinds = {str(kind): each for schema in classes for kind, each in kinds_of(schema).items()}
    if len(kinds) > 1:
        return kinds
    if len(classes) == 1:
        return {"": next(iter(kinds.values()), classes[0])}
    return {each.__name__: each for each in classes}


def shared_keys(variants: Mapping[str, type], section: str) -> dict[str, Key]:
    """Return the keys that are alike in all classes of a section."""
    first, *others = [keys_of(variant, section) for variant in variants.values()]
    return {name: key for name, key in first.items() if all(other.get(name) == key for other in others)}


def summary(documented: type) -> str:
    """Return the docstring of a class in one line; empty for a dataclass without one."""
    if (documented.__doc__ or "").startswith(f"{documented.__name__}("):  # Python sets it to the signature
        return ""
    text = " ".join((documented.__doc__ or "").split())
    return text if text.endswith((".", ":")) else f"{text}."


@functools.cache
def _field_docs(schema: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, including those that it inherits."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        tree = _classes(each.__module__).get(each.__qualname__)
        if tree is None:  # a user's class that was defined in a function, or whose source is not available
            continue
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                found[statement.target.id] = inspect.cleandoc(str(following.value.value))  # type: ignore[attr-defined]
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _describe_type(hint: Any) -> str:
    """Return a type in words, with the choices of an enumeration."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_describe_type(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*kinds, *(["null"] if type(None) in arguments else [])])
    if origin is list:
        return f"list of {_describe_type(arguments[0])}"
    if origin is dict:
        return f"{_describe_type(arguments[1])} by name"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"{hint.__name__}: {', '.join(hint)}"
    if dataclasses.is_dataclass(hint):
        return "section"
    return _PLAIN_TYPES.get(hint, getattr(hint, "__name__", str(hint)))


def _default_of(each: dataclasses.Field[Any]) -> str:
    """Return a field's default as it is written on a command line; "required" without one."""
    if each.default_factory is not dataclasses.MISSING:
        value = each.default_factory()
    elif each.default is not dataclasses.MISSING:
        value = each.default
    else:
        return "required"
    return written(value)


def purpose_of(option: str) -> str:
    """Return the first sentences of the comment at the top of an option's file, without its examples."""
    lines = []
    for line in option.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#   "):
            break
        lines.append(line[2:])
    return " ".join(lines)
