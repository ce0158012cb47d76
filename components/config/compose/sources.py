"""Inputs of a composition: the config folders, their options, and the files that Hydra's defaults lists select."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_repository import ConfigRepository  # Hydra has no public way to resolve defaults lists only
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from yaml import MarkedYAMLError, YAMLError

from components.config.compose.typed import UNSET, yaml_with_texts
from components.config.kinds import KINDS, WITHOUT_KIND
from components.config.schema.recipes import RecipeConfig
from components.package import PROJECT
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import YamlLimitError, load_yaml, read_regular

_LARGEST = 1 << 24  # bytes of a YAML file
_DEEPEST = 50  # nested lists and dicts of an override
CONF = PROJECT / "conf"
"""conf/ of this project; absolute, so that a copied recipe finds it."""
_SCHEMA = re.compile(r"schema/(?:(\w+)/)?(\w+)")


@dataclass(frozen=True)
class Request:
    """Composition request: main config, schema, config folders and overrides."""

    name: str
    """Name of the main config: conf/<name>.yaml."""
    schema: type[RecipeConfig]
    folders: tuple[Path, ...]
    """Config folders in search order."""
    overrides: tuple[str, ...]
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Values of whole sections, which replace those of the config files."""
    replaced: list[str] = field(default_factory=list, compare=False)
    """Lines about option files that are used instead of others of their name; filled by `read_files`."""

    @property
    def groups(self) -> dict[str, list[str]]:
        """Names of the options of each group of the recipe, by group."""
        return recipe_groups(self.name, self.folders)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Values of a config file."""

    name: str
    """Path in its folder without .yaml: optimizer/muon."""
    package: str
    """Dotted key below which its values are; empty for none."""
    values: dict[str, Any]


def read_files(request: Request, options: Iterable[Override]) -> list[ConfigFile]:
    """Return the files that the main config and these group options select, in the order in which they are merged.

    Raises HydraException for a defaults list that requests what does not exist, and ConfigError for a file that cannot
    be read.
    """
    version.setbase("1.3")
    folders = _Folders(request)
    try:
        selected = create_defaults_list(folders, request.name, list(options), prepend_hydra=False, skip_missing=False)
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(
            f"{request.name}.yaml, or a file of its defaults, includes itself; remove it there"
        ) from error
    except ValueError as error:  # such as an item of a defaults list that is neither a text nor a mapping
        raise HydraException(str(error)) from error
    named = [
        (default.config_path, (default.package or "").replace("_global_", "").strip("."))
        for default in selected.defaults
    ]
    return [ConfigFile(name, package, folders.values(name, package)) for name, package in named if name is not None]


class _Folders(ConfigRepository):
    """Config folders as Hydra's code for defaults lists reads them; of two files of a name, the first one counts.

    schema/<recipe> is an empty config, and schema/<section>/<kind> holds the kind.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._read: dict[str, ConfigResult | None] = {}
        self._texts: dict[str, str] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the defaults list and the package of a config; None if there is none."""
        if config_path not in self._read:
            self._read[config_path] = self._load(config_path)
        return self._read[config_path]

    def group_exists(self, config_path: str) -> bool:
        """Return whether a folder has this group."""
        return any((folder / config_path).is_dir() for folder in self._request.folders)

    def config_exists(self, config_path: str) -> bool:
        """Return whether a folder has this config."""
        return self.load_config(config_path) is not None

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """Return the names of the options of a group."""
        return sorted(option_texts(self._request.folders, group_name))

    def get_sources(self) -> list[ConfigSource]:
        """Return nothing: Hydra lists its sources only in messages."""
        return []

    def values(self, name: str, package: str) -> dict[str, Any]:
        """Return the values of a loaded config, with texts as they are written."""
        if name not in self._texts:
            schema = _SCHEMA.fullmatch(name)
            return {"kind": schema[2]} if schema and schema[1] else {}
        values = yaml_with_texts(self._texts[name], self._request.schema, package) or {}
        return {key: value for key, value in values.items() if key not in ("defaults", "hydra")}

    def _load(self, name: str) -> ConfigResult | None:
        file = next((path for folder in self._request.folders if _is_there(path := folder / f"{name}.yaml")), None)
        if file is None:
            schema = _SCHEMA.fullmatch(name)
            exists = schema is not None and (
                schema[2] in KINDS[schema[1]] if schema[1] in KINDS else self._has(schema[2])
            )
            empty = ConfigResult(
                "", name, OmegaConf.create(), {"package": None if schema and schema[1] else "_global_"}
            )
            empty.defaults_list = []
            return empty if exists else None
        self._note_replaced(file, f"{name}.yaml")
        text = self._texts[name] = _text_of(file)
        values = yaml_with_texts(text, self._request.schema) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: must hold keys and values, such as lr: 1e-4, not {values!r:.40}")
        try:
            header = ConfigSource._get_header_dict(text)
        except ValueError as error:
            raise ConfigError(
                f"conf file {name}.yaml: {error}; write `# @package SECTION` as its first line"
            ) from error
        result = ConfigResult("", name, OmegaConf.create({"set": True} if values.keys() - {"defaults"} else {}), header)
        defaults = values.get("defaults", [])
        if not isinstance(defaults, list):
            raise ConfigError(f"conf file {name}.yaml: defaults must be a list of options, not {defaults!r:.40}")
        own = [default for default in defaults if not _is_of_hydra(default)]
        try:
            result.defaults_list = self._create_defaults_list(name, OmegaConf.create(own))
        except (ValueError, AssertionError) as error:
            raise ConfigError(
                f"conf file {name}.yaml: each item of its defaults must be FILE or GROUP: OPTION; it has {own!r:.100}"
            ) from error
        return result

    def _has(self, main_config: str) -> bool:
        return any((folder / f"{main_config}.yaml").is_file() for folder in self._request.folders)

    def _note_replaced(self, used: Path, name: str) -> None:
        """Note the other files that have this name, but other content than the one that is used."""
        replaced = self._request.replaced
        for other in (folder / name for folder in self._request.folders if (folder / name).is_file()):
            line = f"{used}: used instead of {other}"
            if other != used and line not in replaced and other.read_bytes() != used.read_bytes():
                replaced.append(line)


@functools.cache
def parsed(override: str) -> Override:
    """Return an override as Hydra parses it. Raises HydraException, also for nesting that omegaconf cannot hold."""
    if max(accumulate((each in "[{(") - (each in "]})") for each in override), default=0) > _DEEPEST:
        raise HydraException(f"nested more than {_DEEPEST} deep")
    try:
        return OverridesParser.create().parse_override(override)
    except ValueError as error:  # a number of 5,000 digits
        raise HydraException(str(error)) from error


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts with the values of `over`; a required value of it leaves the one below."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, dict):
            result[key] = merged(below if isinstance(below, dict) else {}, value)
        elif value != UNSET or key not in result:
            result[key] = value
    return result


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a value below a dotted key."""
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    return value


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of nested dicts; None if there is none."""
    value: Any = values
    for name in key.split(".") if key else ():
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_there(file: Path) -> bool:
    """Return whether there is a file, perhaps one that cannot be read, such as a pipe."""
    return file.exists() and not file.is_dir()


def _is_of_hydra(default: Any) -> bool:
    """Return whether an item of a defaults list sets options of Hydra itself, which have no effect here."""
    return isinstance(default, dict) and any(str(key).split()[-1].startswith("hydra/") for key in default)


def _text_of(file: Path) -> str:
    """Return the text of a config file. Raises ConfigError if it cannot be read, is not YAML, or has too many
    aliases."""
    try:
        text = read_regular(file, _LARGEST).decode()
        if CONF not in file.parents or file.parent == CONF / "local":
            load_yaml(text)  # in Python: the same messages on every machine, and limits
    except YamlLimitError as error:
        raise ConfigError(f"{file}: {error}; write the values without aliases, or remove the file") from error
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{file}{line}: is not valid YAML: {error.problem}; put quotes around special characters"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; remove it from the folder of configs") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not valid YAML: {error}".partition("\n")[0]) from error
    return text


def config_folders(name: str, recipe_dir: Path, given: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the config folders in search order.

    They are `given`, ./conf, conf/ next to the recipe, and conf/ of this project, so that a file of the user replaces a
    built-in one of its name. Raises ConfigError if none holds <name>.yaml.
    """
    nearby = [path.resolve() for path in (Path.cwd() / "conf", recipe_dir / "conf") if path.is_dir()]
    folders = list(dict.fromkeys([*given, *(path for path in nearby if path != CONF), CONF]))
    if not any((folder / f"{name}.yaml").is_file() for folder in folders):
        searched = ", ".join(map(str, folders))
        raise ConfigError(f"{name}.yaml: no such config in {searched}; add it, or set --config-dir")
    return tuple(folders)


def option_groups(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the names of the options of every config group in `folders`, by group."""
    groups: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.glob("*/**/*.yaml")):
            options = groups.setdefault(file.parent.relative_to(folder).as_posix(), [])
            if file.stem not in options:
                options.append(file.stem)
    return groups


def recipe_groups(name: str, folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the groups of `option_groups` that the defaults list of <name>.yaml has, and the user's own groups.

    Hydra rejects the options of any other group.
    """
    folders = list(folders)
    groups, listed = option_groups(folders), _listed_groups(name, folders)
    known = groups if folders == [CONF] else option_groups([CONF])
    return {group: options for group, options in groups.items() if group in listed or group not in known}


def _listed_groups(name: str, folders: Sequence[Path], including: tuple[str, ...] = ()) -> set[str]:
    """Return the groups in the defaults list of a main config, and of those that it includes."""
    file = next((file for folder in folders if (file := folder / f"{name}.yaml").is_file()), None)
    try:
        entries = (load_yaml(read_regular(file, _LARGEST).decode()) or {}).get("defaults", []) if file else []
    except (OSError, UnicodeDecodeError, YAMLError, AttributeError):
        return set()  # the composition reports the file
    groups: set[str] = set()
    for entry in entries:
        if isinstance(entry, dict):
            groups |= {str(key).split()[-1].partition("@")[0].lstrip("/") for key in entry}
        elif entry not in ("_self_", name, *including):
            included = str(entry).split()[-1].partition("@")[0].lstrip("/")
            groups |= _listed_groups(included, folders, (*including, name))
    return groups


def option_texts(folders: Iterable[Path], group: str) -> dict[str, str]:
    """Return the file content of each option of a group by name; the first folder takes precedence."""
    texts: dict[str, str] = {}
    for folder in folders:
        for file in sorted((folder / group).glob("*.yaml")):
            with suppress(OSError, UnicodeDecodeError):
                texts.setdefault(file.stem, read_regular(file, _LARGEST).decode())
    return texts


def kind_of_option(section: str, option: str, texts: Mapping[str, str]) -> StrEnum | None:
    """Return the kind of an option of a section; None for an unreadable or unknown one.

    Args:
        section: A section with kinds.
        option: Name of the option.
        texts: The files of the section's options by name.
    """
    try:
        values = load_yaml(texts.get(option, "")) or {}
        defaults = values.get("defaults", [])
    except (YAMLError, AttributeError):
        return None
    named = values.get("kind")
    for each in defaults if isinstance(defaults, list) and not named else []:
        if not isinstance(each, str):
            continue
        stated = re.fullmatch(rf"/schema/{section}/(\w+)@_here_", str(each))
        if stated or each in texts:
            named = stated[1] if stated else kind_of_option(section, each, {**texts, option: ""})
    named = named or WITHOUT_KIND.get(section)
    return next((kind for kind in KINDS[section] if kind == named), None)
