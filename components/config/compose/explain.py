"""Errors of Hydra and omegaconf as config errors: the value, the rule, the key, and the nearest existing name.

Hydra, omegaconf and PyYAML raise few exception classes and put the facts (key, file, rule) only into the message. Each
pattern below matches one message; no other file depends on the wording of these libraries.
`tests/config/test_explain.py` provokes all of them with the installed versions, so that a changed wording fails there
by the name of the pattern.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import get_type_hints

from components.config.compose.synonyms import note_on, option_meant, option_synonym, synonym_of, without_key
from components.config.kinds import KINDS
from components.protocol.secrets import shown_value

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
NUMBER_NAMES = {"Integer": "a whole number", "Float": "a number"}
UNREADABLE = "cannot be parsed; write KEY=VALUE, and quote a value with special characters: 'KEY=\"a=b\"'"
SEVERAL_VALUES = "is a sweep over several values; add -m, set one value, or write a list as [a,b]"
SWEEP_FUNCTION = re.compile(r"(?P<key>[^=]+)=\s*(?P<name>log|lin|loguniform|uniform)\((?P<arguments>[^()]*)\)\s*")
"""Override with a function of sweep_keys.py, which Hydra cannot parse."""
HOME = re.compile(r"(?<![^,\[])~/")
"""~ at the start of a value, or of one of several; shells do not expand it after KEY=."""
SOURCES = "data.sources"
NOT_A_MIXTURE = "only a mixture has sources; add data=mixture, or another option of data with kind mixture"
TASKS = "evaluation."
NO_TASKS = (
    "this recipe evaluates no benchmark tasks, which need an LM head's probabilities of tokens; remove it, and for a "
    "score head use scripts/score.py on the export"
)
TOP_K = "teacher.top_k"
NOT_STORING = "belongs to scripts/teacher.py, which stores the most likely tokens; remove it here, and set it there"
_PACKAGES = {"network": "cluster"}
"""Group -> section whose keys its options set, if the names differ; other groups without a section use _global_."""
SET_BY_KEY = {"gpu": "cluster.gpu"}
"""Folder of options that are no group of a recipe -> key whose value names one of them."""
IS_A_SECTION = "is a section with keys, not a value"
VALUE_RULES = (
    (NOT_CONVERTIBLE, "must be {wanted}"),
    (NOT_A_BOOL, "must be true or false"),
    (NOT_A_CHOICE, "must be one of {choices}"),
    (NULL_TEXT, "must not be null; put quotes around a text that is null or ~"),
    (NULL_KEY, "has the key null; put quotes around it"),
    (KEY_IS_NO_TEXT, "the key {name} is a number or boolean here; set it in a file of yours, where keys are texts"),
    (NOT_OPTIONAL, "must not be null"),
    (NOT_A_LIST, "must be a list, such as [a,b]"),
    (NOT_A_SECTION, IS_A_SECTION),
    (NOT_A_SINGLE_VALUE, "must be a single value"),
    (UNKNOWN_KEY, "sets the key {leaf}, which does not exist"),
    (NO_DELETION, "cannot be removed; set it to another value"),
)
"""Pattern of a message of omegaconf or Hydra about a value, and the rule in Meshbook's terms."""


def unreadable(override: str) -> str:
    """Return the message for an override that Hydra's grammar rejects."""
    key, _, value = override.partition("=")
    if SWEEP_FUNCTION.fullmatch(override):
        return f"{override}: {SEVERAL_VALUES}"
    if not value and override.endswith((".yaml", ".yml")):
        name = override.rpartition("/")[2].rpartition(".")[0]
        return (
            f"{override}: a file of settings is conf/experiment/{name}.yaml, with `# @package _global_` as its first "
            f"line; write experiment={name}"
        )
    if key.endswith("split") and "[" in value:
        return f"{override}: a split has no slices; write {key}={value.partition('[')[0]} data.max_samples=N"
    if (expanded := HOME.sub("$HOME/", value)) != value:
        return f"{override}: ~ is not expanded here; write {key}={expanded}, or quote it: '{key}=\"~/...\"'"
    return f"{override}: {UNREADABLE}"


def unknown_key(key: str, value: object, existing: Iterable[str]) -> str:
    """Return the message for a key that does not exist; `value` is None if it was given without a value."""
    value = shown_value(key, value)
    shown = key if value is None else f"{key}={value}"
    if key == TOP_K:
        return f"{shown}: {NOT_STORING}"
    names = list(existing)
    if key.startswith(TASKS) and not any(name.startswith(TASKS) for name in names):
        return f"{shown}: {NO_TASKS}"
    if key.startswith(SOURCES) and not any(name.startswith(f"{SOURCES}.") for name in names):
        return f"{shown}: {NOT_A_MIXTURE}"
    return f"{shown}: no such key{_intended(key, value, names)}"


def key_of_another_kind(section: str, kind: str, fitting: Sequence[str]) -> str:
    """Return the message for a key that only other kinds of a section have."""
    return f"{section} of kind {kind} has no such key (kinds with this key: {', '.join(fitting)})"


def no_kind(key: str, name: object, kinds: Iterable[str]) -> str:
    """Return the message for the name of a kind that a section does not accept."""
    names = list(kinds)
    return f"{key}={name}: must be one of {', '.join(names)}{did_you_mean(nearest(str(name), names))}"


def no_option(option: str, existing: Iterable[str]) -> str:
    """Return the message for a command-line option (--lr) that Hydra does not have."""
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    is_key = name in existing or name in ("experiment", "data", "model")
    intended = f": {name}={value or '...'}" if is_key else _intended(name, value or None, list(existing))
    return f"{option}: no such option, see --help; write settings as KEY=VALUE{intended}"


def no_such_option(override: str, option: str, groups: Mapping[str, list[str]]) -> str:
    """Return the message for an option of a group that no config folder holds; `groups` has the options of all."""
    return f"{override}: {_unknown_option(override_parts(override)[0], option, groups)}"


def no_group(override: str) -> str:
    """Return the message for an option of a group that the recipe's config does not have."""
    key, _, value = override_parts(override)
    if key in SET_BY_KEY:
        return f"{key}={value}: no such key; write {SET_BY_KEY[key]}={value}"
    return f"{key}={value}: this recipe has no options of {key}; remove it"


def no_source(subject: str, name: str, sources: Iterable[str]) -> str:
    """Return the message for a key of a source that was not added to the mixture; `subject` is the key or override."""
    like = did_you_mean(nearest(name, sources))
    return f"{subject}: the mixture has no source {name}{like or f'; add it: +data@{SOURCES}.{name}=OPTION'}"


def did_you_mean(name: str | None) -> str:
    """Return `; did you mean NAME?`, or an empty string for None."""
    return f"; did you mean {name}?" if name else ""


def _intended(key: str, value: object, existing: list[str]) -> str:
    """Return `; did you mean KEY?` for the name of a key in another tool or a misspelled one, and its unit if it
    differs; or ''."""
    leaf = key.rpartition(".")[2]
    if remedy := without_key(leaf):
        return remedy
    for name in (key, leaf):
        if value is not None and (option := option_meant(name, value)) and option.partition("=")[0] in existing:
            return did_you_mean(option)
        if meant := synonym_of(name, existing):
            return did_you_mean(meant) + note_on(name, "the value" if value is None else value)
    return did_you_mean(nearest_key(key, existing))


def nearest(name: str, existing: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar name, or None if the similarity is below `cutoff`."""
    return next(iter(difflib.get_close_matches(name, list(existing), n=1, cutoff=cutoff)), None)


def nearest_key(key: str, existing: list[str]) -> str | None:
    """Return the dotted key that was probably intended.

    In this order: the key with this name in another tool (learning_rate: optimizer.lr), a sibling with a similar name
    (model.head: model.heads), a similar path (trainig.max_steps), a key with that name in another section (training.lr:
    optimizer.lr).
    """
    prefix, _, leaf = key.rpartition(".")
    if synonym := synonym_of(key, existing) or synonym_of(leaf, existing):
        return synonym
    sections = {name.rpartition(".")[0] for name in existing}
    keys = [name for name in existing if name not in sections or existing.count(name) > 1]  # twice: has options, too
    siblings = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == prefix}
    if sibling := nearest(leaf, siblings):
        return siblings[sibling]
    if path := nearest(key, existing, cutoff=0.85):
        return path
    leaves = {name.rpartition(".")[2]: name for name in reversed(keys)}
    namesake = nearest(leaf, leaves, cutoff=0.8)
    return leaves[namesake] if namesake else None


def explain_value(error: Exception) -> str:
    """Return the rule that a value violates, in one line."""
    text = str(error)
    return _rule(str(error.__cause__ or error) if not text or MERGING.search(text) else text) or type(error).__name__


def _rule(text: str) -> str:
    for pattern, rule in VALUE_RULES:
        if found := pattern.search(text):
            texts = {key: NUMBER_NAMES.get(name, name) for key, name in found.groupdict().items()}
            return rule.format(**texts) + _nearest_choice(text, texts.get("choices"))
    return _first_line(text)


def explain_resolution(error: Exception) -> str:
    """Return the message for an interpolation (${...}) that cannot be resolved, with the key that holds it."""
    found = FULL_KEY.search(str(error))
    key = f"{found['key']}: " if found else ""
    return f"{key}{_first_line(str(error))}; correct the ${{...}} in its value, or write \\${{...}} for literal text"


def explain_override(
    override: str, error: Exception, keys: list[str], groups: dict[str, list[str]], fitting: Sequence[str] = ()
) -> str:
    """Return the message for an override that Hydra rejected.

    Args:
        override: As typed, for example `training.max_step=3`.
        error: What Hydra raised.
        keys: All dotted keys of the schema, including those of all kinds of its sections.
        groups: Accepted options of every config group.
        fitting: If the chosen option of the section lacks the key, the options that have it, likeliest first.
    """
    text = f"{error} {error.__cause__ or ''}"
    key, assigned, value = override_parts(override)
    override = override.removeprefix("++")  # added to those of free-form sections
    if IN_FILE.search(text) or NOT_YAML.search(text) or _requested_by_file(key, value, text):
        return explain_file(error, keys, groups, f"{key}/{value}")
    if found := NO_OPTION.search(text):
        return no_such_option(override, found["option"], groups)
    if not override.startswith("+") and (second := SECOND_OPTION.search(text)) and second["group"] != key:
        where = f"conf file {key}/{value}.yaml adds a second option of {second['group']}"
        return f"{where}; write `override /{second['group']}: {second['option']}` in its defaults"
    if ALREADY_THERE.search(text):
        return f"{override}: is already set; write {key}={value} without the plus"
    if NOTHING_TO_OVERRIDE.search(text) and f"@{SOURCES}." in override:
        return f"{override}: adds a source; write it with a plus: +{override}"
    if NO_SUCH_KEY.search(text):
        if key not in keys:
            return unknown_key(key, value if assigned else None, [*keys, *groups])
        section = key.partition(".")[0]
        if section not in groups or value.startswith("{"):
            return f"{override}: sets a key that {key} does not have"
        lacks = f"{key}={value}: the chosen option of {section} has no such key"
        kinds = [
            str(kind) for kind, each in KINDS.get(section, {}).items() if key.partition(".")[2] in get_type_hints(each)
        ]
        if not fitting and kinds:
            return f"{lacks}, and this recipe accepts none of the kinds that have it ({', '.join(kinds)}); remove it"
        if not fitting:
            return f"{lacks}; choose another with {section}=NAME (there are: {', '.join(groups[section])})"
        others = f", or another {section}=NAME that has it ({', '.join(fitting[1:])})" if fitting[1:] else ""
        return f"{lacks}; add {section}={fitting[0]}{others}"
    if NOT_AN_OPTION.search(text):
        return f"{override}: must be the name of an option (there are: {', '.join(groups[key])})"
    return f"{override}: {explain_value(error)}"


def explain_file(error: Exception, keys: list[str], groups: dict[str, list[str]], chosen: str | None = None) -> str:
    """Return the message for an error that is caused by a config file and not by an override.

    Args:
        error: What Hydra raised.
        keys: All dotted keys of the schema.
        groups: Accepted options of every config group.
        chosen: File chosen on the command line, since Hydra names the main config if the error is in its overrides.
    """
    if rejected := REJECTED_KIND.search(str(error)):
        where = chosen.replace("/", "=", 1) if chosen else rejected["section"]
        kinds = {str(kind): each for kind, each in KINDS[rejected["section"]].items()}
        recipe = getattr(kinds[rejected["kind"]], "recipe", None)
        rule = f"use {recipe}, or choose another option" if recipe else "choose another option"
        return f"{where}: has kind {rejected['kind']}, which this recipe does not accept; {rule}"
    if broken := NOT_YAML.search(str(error)):
        where = f"{broken['file']}, line {broken['line']}"
        return f"{where}: is not valid YAML: {broken['what']}; put quotes around special characters"
    if requested := NO_OPTION.search(str(error)) or NO_GROUP.search(str(error)):
        return _explain_defaults(requested, groups, chosen)
    found = IN_FILE.search(str(error))
    if found is None:
        return explain_value(error)
    where, key = f"conf file {found['file']}.yaml", FULL_KEY.search(found["what"])
    named = f"{where}: {key['key']}" if key else where
    if unknown := UNKNOWN_KEY.search(found["what"]):
        if missing := _missing_package_header(found["file"], key["key"] if key else "", keys):
            return f"{where}: {missing}"
        return _unknown_in_file(named, key["key"] if key else "", unknown, keys)
    return f"{named}: {_rule(found['what'])}"


def _missing_package_header(file: str, key: str, keys: Sequence[str]) -> str | None:
    """Return the message for a file without the @package header, if that explains an unknown key; else None."""
    group = file.rpartition("/")[0]
    header = f"`# @package {_PACKAGES.get(group, '_global_')}`"
    if group and key == group and group not in keys:
        return f"its keys are read as {group}.KEY, but no section {group} exists; make {header} its first line"
    if group and group not in keys and key.strip("_") == "global":
        return f"its package is read as {key}; make {header} its first line"
    if group in keys and key == f"{group}.{group}":
        return f"its keys are already below {group}; remove the line `{group}:`, or make {header} its first line"
    return None


def _unknown_in_file(named: str, key: str, unknown: re.Match[str], keys: list[str]) -> str:
    """Return the message for a key in a file that its section lacks, possibly because of the section's kind."""
    leaf = unknown["leaf"]
    if leaf == "sources":
        return f"{SOURCES}: {NOT_A_MIXTURE}"
    section = next((name for name, kinds in KINDS.items() if unknown["schema"] in _class_names(kinds.values())), "")
    kinds = KINDS.get(section, {})
    fitting = [kind for kind, schema in kinds.items() if leaf in get_type_hints(schema)]
    if not fitting:
        return f"{named}: no such key{_intended(key, None, keys)}"
    kind_of_schema = next((kind for kind, schema in kinds.items() if schema.__name__ == unknown["schema"]), None)
    if kind_of_schema is not None:
        return f"{named}: {key_of_another_kind(section, kind_of_schema, fitting)}"
    if key.startswith(f"{SOURCES}."):
        name = key.split(".")[2]
        return f"{named}: the mixture has no source {name}; add it to the defaults: OPTION@sources.{name}"
    others = f" (or {', '.join(fitting[1:])} for {fitting[0]})" if fitting[1:] else ""
    return f"{named}: the file must begin with defaults: [/schema/{section}/{fitting[0]}@_here_, _self_]{others}"


def _class_names(kinds: Iterable[type]) -> set[str]:
    """Return the names of the given classes and of their base classes."""
    return {base.__name__ for schema in kinds for base in schema.__mro__}


def _requested_by_file(key: str, value: str, text: str) -> bool:
    """Return whether Hydra misses an option or group that was not typed, so that a config file requests it."""
    option, group = NO_OPTION.search(text), NO_GROUP.search(text)
    if option is not None:
        return option["group"] != key or option["option"] not in re.split(r"[\[\], ]+", value)
    return group is not None and group["group"] != key


def _explain_defaults(requested: re.Match[str], groups: dict[str, list[str]], chosen: str | None) -> str:
    """Return the message for a defaults list that requests a missing group or option."""
    file = requested["file"] if chosen is None or "/" in (requested["file"] or "") else chosen
    where, group, option = f"conf file {file}.yaml", requested["group"], requested.groupdict().get("option")
    named = group if option is None else f"{group}={option}"
    kinds = KINDS.get(group.removeprefix("schema/"), {}) if group.startswith("schema/") else {}
    if option is None and group in groups:  # its package is below the one of the file
        return f"{where} overrides {group} below its own package; make `# @package _global_` its first line"
    if group in ("data", "model") and option and re.search(r"\W", option):
        also = "`override /data: jsonl` in its defaults, and " if group == "data" else ""
        return f"{where} requests {named}: no such option; write {also}`path: {option}` below `{group}:`"
    if options := list(map(str, kinds)) or groups.get(group):
        return f"{where} requests {named}: {_unknown_option(group, option or '', {**groups, group: options})}"
    inner = group.rpartition("/")[2]  # without a leading slash, Hydra looks for a group in the folder of the file
    if inner != group and inner in groups:
        return f"{where} requests {named}: no such group; write `override /{inner}: {option or 'OPTION'}`"
    return f"{where} requests {named}: no such group{did_you_mean(nearest(group, groups))}"


def override_parts(override: str) -> tuple[str, bool, str]:
    """Return the key of an override (without prefix and package), whether it has a value, and the value."""
    key, assigned, value = override.lstrip("+~").partition("=")
    return key.partition("@")[0].strip(), bool(assigned), value


def _unknown_option(group: str, option: str, groups: Mapping[str, list[str]]) -> str:
    """Return the rule that a group lacks an option, with the option that was probably meant.

    In this order: its name in another tool (adam), another notation (LoRA, qwen3-0.6b), the only option of this name
    in another group (experiment=lora), a longer name (qwen3), a similar one.
    """
    options, plain = groups[group], re.sub(r"[\W_]", "", option.lower())
    synonym = option_synonym(group, option)
    elsewhere = [f"{other}={option}" for other, names in groups.items() if option in names and "/" not in other]
    longer = [each for each in options if plain and each.replace("_", "").startswith(plain)]
    like = synonym if synonym in options else next((each for each in longer if each.replace("_", "") == plain), None)
    like = like or (elsewhere[0] if len(elsewhere) == 1 else None) or nearest(re.sub(r"\W", "_", option), longer, 0)
    like = like or nearest(re.sub(r"\W", "_", option.lower()), options)
    many = len(options) > 40
    listed = f"there are {len(options)}, see meshbook help {group}" if many else f"there are: {', '.join(options)}"
    hub = f"; for a model of the hub, write model.path={option}" if group == "model" and not like else ""
    return f"no such option{did_you_mean(like)} ({listed}){hub}"


def _nearest_choice(text: str, choices: str | None) -> str:
    found = GIVEN.search(text)
    return did_you_mean(nearest(found["value"], choices.split(", "))) if found and choices else ""


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "")
