"""Config errors in one sentence: the value, the rule, the key, and the nearest existing name.

Hydra puts the facts about a missing option only into its message. Each pattern below matches one message; no other file
depends on its wording. `tests/config/test_explain.py` provokes all of them with the installed version, so that a
changed wording fails there by the name of the pattern.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, get_args

from components.config.compose.synonyms import note_on, option_meant, option_synonym, synonym_of, without_key
from components.config.kinds import KINDS
from components.protocol.secrets import shown_value

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException

_IN_FILE = re.compile(r"In '(?P<file>[^']*)': ")
"""File whose defaults list is wrong."""
_NO_GROUP = re.compile(r"Could not override '(?P<group>[^'@]*)")
_SECOND_OPTION = re.compile(r"Multiple values for .* use 'override (?P<group>[^:@]+)[^:]*: (?P<option>[^']*)'")
_UNREADABLE = "cannot be parsed; write KEY=VALUE, and quote a value with special characters: 'KEY=\"a=b\"'"
SEVERAL_VALUES = "is a sweep over several values; add -m, set one value, or write a list as [a,b]"
SWEEP_FUNCTION = re.compile(r"(?P<key>[^=]+)=\s*(?P<name>log|lin|loguniform|uniform)\((?P<arguments>[^()]*)\)\s*")
"""Override with a function of sweep_keys.py, which Hydra cannot parse."""
HOME = re.compile(r"(?<![^,\[])~/")
"""~ at the start of a value, or of one of several; shells do not expand it after KEY=."""
SOURCES = "data.sources"
NOT_A_MIXTURE = "only a mixture has sources; add data=mixture, or another option of data with kind mixture"
TASKS = "evaluation."
_NO_TASKS = (
    "this recipe evaluates no benchmark tasks, which need an LM head's probabilities of tokens; remove it, and for a "
    "score head use scripts/score.py on the export"
)
_TOP_K = "teacher.top_k"
_NOT_STORING = "belongs to scripts/teacher.py, which stores the most likely tokens; remove it here, and set it there"
_PACKAGES = {"network": "cluster"}
"""Group -> section whose keys its options set, if the names differ; other groups without a section use _global_."""
SET_BY_KEY = {"gpu": "cluster.gpu"}
"""Folder of options that are no group of a recipe -> key whose value names one of them."""
IS_A_SECTION = "is a section with keys, not a value"


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
    return f"{override}: {_UNREADABLE}"


def unknown_key(key: str, value: object, existing: Iterable[str], subject: str | None = None) -> str:
    """Return the message for a key that does not exist, with the one that was probably meant.

    Args:
        key: The dotted key.
        value: Its value; None if it was given without one.
        existing: All dotted keys.
        subject: How the message names the key; None: KEY=VALUE.
    """
    value = shown_value(key, value)
    if subject is None:
        subject = key if value is None else f"{key}={value}"
    if key == _TOP_K:
        return f"{subject}: {_NOT_STORING}"
    names = list(existing)
    if key.startswith(TASKS) and not any(name.startswith(TASKS) for name in names):
        return f"{subject}: {_NO_TASKS}"
    if key.startswith(SOURCES) and not any(name.startswith(f"{SOURCES}.") for name in names):
        return f"{subject}: {NOT_A_MIXTURE}"
    return f"{subject}: no such key{_intended(key, value, names)}"


def key_of_another_kind(section: str, kind: str, fitting: Sequence[str]) -> str:
    """Return the message for a key that only other kinds of a section have."""
    return f"{section} of kind {kind} has no such key (kinds with this key: {', '.join(fitting)})"


def no_kind(subject: str, name: object, kinds: Iterable[str]) -> str:
    """Return the message for the name of a kind that a section does not accept; `subject` is how it names the key."""
    names = list(kinds)
    return f"{subject}: must be one of {', '.join(names)}{did_you_mean(nearest(str(name), names))}"


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


def explain_resolution(error: OmegaConfBaseException) -> str:
    """Return the message for an interpolation (${...}) that cannot be resolved, with the key that holds it."""
    key = f"{error.full_key}: " if error.full_key else ""
    return f"{key}{_first_line(str(error))}; correct the ${{...}} in its value, or write \\${{...}} for literal text"


def explain_option(override: str, error: Exception, keys: Sequence[str], groups: Mapping[str, list[str]]) -> str:
    """Return the message for an option on the command line that Hydra rejected, or whose file it rejected.

    Args:
        override: As typed, for example `+model=tiny`.
        error: What Hydra raised.
        keys: All dotted keys of the schema, including those of all kinds of its sections.
        groups: Accepted options of every config group.
    """
    key, assigned, value = override_parts(override)
    file, text, missing = _IN_FILE.search(str(error)), str(error), _missing_file(error)
    name = missing.removeprefix(f"{key}/")
    if name != missing and ("${" in value or name in re.split(r"[\[\], ]+", value)):
        return no_such_option(override, name, groups)
    second = _SECOND_OPTION.search(text)
    if file or (second and second["group"] != key):
        return explain_file(error, groups, f"{key}/{value}")
    if second or (override.startswith("+") and key in groups and "@" not in override):
        return f"{override}: is already set; write {key}={value} without the plus"
    if f"@{SOURCES}." in override:
        return f"{override}: adds a source; write it with a plus: +{override}"
    if key not in groups:
        return unknown_key(key, value if assigned else None, [*keys, *groups])
    if _NO_GROUP.search(text):
        return f"{override}: is not in the defaults list; add it with a plus: +{override}"
    return f"{override}: {_first_line(text)}"


def explain_file(error: Exception, groups: Mapping[str, list[str]], chosen: str | None = None) -> str:
    """Return the message for an error in the defaults list of a config file.

    Args:
        error: What Hydra raised.
        groups: Accepted options of every config group.
        chosen: File chosen on the command line, since Hydra names the main config if the error is in its overrides.
    """
    text = str(error)
    match = _IN_FILE.search(text)
    file = chosen if chosen is not None and not (match and "/" in match["file"]) else match and match["file"]
    where = f"conf file {file}.yaml" if file else "a conf file"
    if second := _SECOND_OPTION.search(text):
        group, option = second["group"], second["option"]
        return f"{where} adds a second option of {group}; write `override /{group}: {option}` in its defaults"
    if missing := _missing_file(error):
        group, _, option = missing.rpartition("/")
        return f"{where} requests {_explain_missing_option(group, option, groups)}"
    if requested := _NO_GROUP.search(text):
        return f"{where} {_explain_missing_group(requested['group'], groups)}"
    text = text.removeprefix(match[0]) if match else text
    return f"{where}: {_first_line(text)}"


def _missing_file(error: Exception) -> str:
    """Return the file that a defaults list requests and no folder has, GROUP/OPTION; or ''."""
    from hydra.errors import MissingConfigException  # ranks read frozen configs without Hydra

    return error.missing_cfg_file or "" if isinstance(error, MissingConfigException) else ""


def _explain_missing_option(group: str, option: str, groups: Mapping[str, list[str]]) -> str:
    if not group:
        return f"{option}: no such file"
    named = f"{group}={option}"
    if group in ("data", "model") and re.search(r"\W", option):
        also = "`override /data: jsonl` in its defaults, and " if group == "data" else ""
        return f"{named}: no such option; write {also}`path: {option}` below `{group}:`"
    kinds = KINDS.get(group.removeprefix("schema/"), {}) if group.startswith("schema/") else {}
    if options := list(map(str, kinds)) or groups.get(group):
        return f"{named}: {_unknown_option(group, option, {**groups, group: options})}"
    return f"{named}: no such group{did_you_mean(nearest(group, groups))}"


def _explain_missing_group(group: str, groups: Mapping[str, list[str]]) -> str:
    if group in groups:  # its package is below the one of the file
        return f"overrides {group} below its own package; make `# @package _global_` its first line"
    inner = group.rpartition("/")[2]  # without a leading slash, Hydra looks for a group in the folder of the file
    if inner != group and inner in groups:
        return f"requests {group}: no such group; write `override /{inner}: OPTION`"
    return f"requests {group}: no such group{did_you_mean(nearest(group, groups))}"


def explain_unknown_key(file: str, key: str, value: object, keys: Sequence[str]) -> str:
    """Return the message for a key of a config file that does not exist.

    Args:
        file: Its group and name, such as optimizer/mine.
        key: The dotted key, with the package of the file.
        value: The value.
        keys: All dotted keys of the schema.
    """
    group = file.rpartition("/")[0]
    header = f"`# @package {_PACKAGES.get(group, '_global_')}`"
    where = f"conf file {file}.yaml"
    section = key.partition(".")[0]
    if group and group not in keys and section == group.partition("/")[0]:
        return f"{where}: its keys are read as {group}.KEY, but no section {group} exists; make {header} its first line"
    if group and group not in keys and section.strip("_") == "global":
        return f"{where}: its package is read as {section}; make {header} its first line"
    if key in keys:
        return f"{where}: {key}: keys of a file are nested; write `{key.replace('.', ': {', 1)}: ...}}`"
    if group in keys and key == f"{group}.{group}":
        return (
            f"{where}: its keys are already below {group}; remove the line `{group}:`, or make {header} its first line"
        )
    return unknown_key(key, value, keys, f"{where}: {key}")


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


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "")


def written(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{written(entry)}' for key, entry in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values of a type that has few: true and false, or those of an enumeration."""
    kinds = [each for each in (get_args(hint) or (hint,)) if each is not type(None)]
    if kinds == [bool]:
        return ("true", "false")
    return tuple(kinds[0]) if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], StrEnum) else ()
