"""Where a config comes from: this project's conf/, the conf/ folders beside it, the dataclasses, the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import BooleanNode, DictConfig, OmegaConf, ValidationError
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from components.config.errors import ConfigError
from components.config.kinds import KINDS, kinds_of
from components.config.safe_yaml import YamlLimitError, check_expansion
from components.config.schema.recipes import RecipeConfig

CONF = Path(__file__).resolve().parents[3] / "conf"
"""This project's conf/, absolute, so that a copied recipe finds it."""


@dataclass(frozen=True)
class Request:
    """What a person asked for."""

    name: str
    """Of the main config: conf/<name>.yaml."""
    schema: type[RecipeConfig]
    folders: tuple[Path, ...]
    """Folders with configs; the first holds the main config."""
    overrides: tuple[str, ...]

    @property
    def search_path(self) -> list[str]:
        """The override that makes Hydra search the other folders after the first."""
        escaped = [str(folder).replace("\\", "\\\\").replace("'", "\\'") for folder in self.folders[1:]]
        return ["hydra.searchpath=[" + ",".join(f"'file://{path}'" for path in escaped) + "]"] if escaped else []

    def compose(self, overrides: Iterable[str]) -> DictConfig:
        """Let Hydra compose the main config with `overrides`. Raises HydraException or OmegaConfBaseException."""
        GlobalHydra.instance().clear()
        try:
            folder = str(self.folders[0])
            with (
                strict_booleans(),
                replaceable_kinds(),
                initialize_config_dir(folder, job_name=self.name, version_base="1.3"),
            ):
                return compose(self.name, overrides=[*self.search_path, *overrides])
        except OmegaConfBaseException:
            raise
        except (ValueError, YAMLError) as error:  # what Hydra says of parallelism=3; a file that is no YAML
            raise HydraException(str(error)) from error


def register_schemas(name: str, schema: type[RecipeConfig]) -> None:
    """Put the dataclasses where defaults lists find them: schema/<name>, and schema/<section>/<kind> for options.

    A recipe's own subclass of a kind is registered in its place, so that the kind's options fill it.
    """
    store = ConfigStore.instance()
    store.store(group="schema", name=name, node=OmegaConf.structured(schema), package="_global_")
    annotations = [hint for hint in get_type_hints(schema).values() if isinstance(hint, type)]
    for section, kinds in KINDS.items():
        for kind, each in kinds.items():
            own = next((hint for hint in annotations if issubclass(hint, each)), each)
            store.store(group=f"schema/{section}", name=str(kind), node=OmegaConf.structured(own))


@contextmanager
def strict_booleans() -> Iterator[None]:
    """Let no boolean of omegaconf be set by a number: `plot: 2` is a mistake, which it would take for true.

    For all of its booleans, because it makes those of a section anew whenever another config is merged into it.
    """
    convert = BooleanNode._validate_and_convert_impl

    def convert_strictly(node: BooleanNode, value: Any) -> Any:
        if type(value) is int or (isinstance(value, str) and value.isdigit()):
            raise ValidationError("Value '$VALUE' is not a valid bool (type $VALUE_TYPE)")
        return convert(node, value)

    BooleanNode._validate_and_convert_impl = convert_strictly  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        BooleanNode._validate_and_convert_impl = convert  # type: ignore[method-assign]


@contextmanager
def replaceable_kinds() -> Iterator[None]:
    """Let an option replace the kind that a section has by default, with the keys of its own kind only.

    A section with a default is merged into by the option (`defaults: [/schema/optimizer/KIND@_here_, _self_]`).
    omegaconf only merges a dataclass into its own base, and keeps the keys of what it merges into.
    """
    validate = DictConfig._validate_merge

    def replace_or_validate(node: DictConfig, value: Any) -> None:
        kind, other = OmegaConf.get_type(node), OmegaConf.get_type(value)
        annotation = node._metadata.ref_type
        if other is not kind and {kind, other} <= set(kinds_of(annotation).values()):
            node._set_value(other)
        validate(node, value)

    DictConfig._validate_merge = replace_or_validate  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DictConfig._validate_merge = validate  # type: ignore[method-assign]


def config_folders(
    name: str, recipe_dir: Path, before: Iterable[Path] = (), after: Iterable[Path] = ()
) -> tuple[Path, ...]:
    """Return the folders to search, the one that holds <name>.yaml first.

    They are those `before`, this project's conf/, ./conf and the conf/ beside the recipe where they exist, and
    those `after`. Raises ConfigError where none holds <name>.yaml, or a file expands without reasonable bound.
    """
    own = [path.resolve() for path in (Path.cwd() / "conf", recipe_dir / "conf") if path.is_dir()]
    folders = list(dict.fromkeys([*before, CONF, *own, *after]))
    main = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if main is None:
        places = ", ".join(map(str, folders))
        raise ConfigError(f"{name}.yaml: there is no such config in {places}; add it, or see --config-dir")
    for folder in folders:
        if folder != CONF:
            _check_aliases(folder)
    return tuple(dict.fromkeys([main, *folders]))


def _check_aliases(folder: Path) -> None:
    """Reject a folder one of whose files Hydra could not read in any time; other errors are left to Hydra."""
    for file in sorted(folder.rglob("*.yaml")):
        with suppress(OSError, UnicodeDecodeError, YAMLError):
            text = file.read_text()
            if "*" in text:
                try:
                    check_expansion(text)
                except YamlLimitError as error:
                    raise ConfigError(f"{file}: {error}; write the values out, or remove the file") from error


def option_groups(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the options of every config group under `folders`, by group."""
    groups: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.glob("*/**/*.yaml")):
            options = groups.setdefault(file.parent.relative_to(folder).as_posix(), [])
            if file.stem not in options:
                options.append(file.stem)
    return groups


def option_texts(folders: Iterable[Path], group: str) -> dict[str, str]:
    """Return the text of each option of a group, by its name; of several files with one name that of the first."""
    texts: dict[str, str] = {}
    for folder in folders:
        for file in sorted((folder / group).glob("*.yaml")):
            with suppress(OSError, UnicodeDecodeError):
                texts.setdefault(file.stem, file.read_text())
    return texts
