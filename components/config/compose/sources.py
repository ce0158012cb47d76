"""Inputs of a composition: conf/ of this project, further config folders, the dataclasses and the command line."""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # Hydra has no public way to change how files are read
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import BooleanNode, DictConfig, OmegaConf, ValidationError, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from components.config.compose.explain import override_parts
from components.config.compose.typed import yaml_with_texts
from components.config.kinds import KINDS, kinds_of, type_hints
from components.config.schema.objective import ObjectiveKind
from components.config.schema.recipes import RecipeConfig
from components.config.shape import ModelShape
from components.project import PROJECT
from components.protocol.errors import ConfigError
from components.protocol.safe_json import read_regular
from components.protocol.safe_yaml import YamlLimitError, check_expansion, load_yaml

_LARGEST = 1 << 24  # bytes of a YAML file
CONF = PROJECT / "conf"
"""conf/ of this project; absolute, so that a copied recipe finds it."""
_UNLESS_EPOCHS = "unless_epochs"
"""Resolver of training.max_steps: ${unless_epochs:40} is 40, or null if training.epochs is given."""
_WITH_KTO = "with_kto"
"""Resolver of data.label_column: ${with_kto:label} is label with objective=kto, else null."""


@dataclass(frozen=True)
class Request:
    """Composition request: main config, schema, config folders and overrides."""

    name: str
    """Name of the main config: conf/<name>.yaml."""
    schema: type[RecipeConfig]
    folders: tuple[Path, ...]
    """Config folders in search order."""
    overrides: tuple[str, ...]
    replaced: list[str] = field(default_factory=list, compare=False)
    """A line for each file that a composition used instead of another one of its name and group."""

    @property
    def main_folder(self) -> Path:
        """The first folder that holds the main config."""
        return next(folder for folder in self.folders if (folder / f"{self.name}.yaml").is_file())

    @property
    def search_path(self) -> list[str]:
        """Override that adds all folders but the main config's to Hydra's search path."""
        others = [folder for folder in self.folders if folder != self.main_folder]
        escaped = [str(folder).replace("\\", "\\\\").replace("'", "\\'") for folder in others]
        return ["hydra.searchpath=[" + ",".join(f"'file://{path}'" for path in escaped) + "]"] if escaped else []

    @property
    def groups(self) -> dict[str, list[str]]:
        """Names of the options of each group of the recipe, by group."""
        return recipe_groups(self.name, self.folders)

    def compose(self, overrides: Iterable[str]) -> DictConfig:
        """Compose the main config with `overrides`. Raises HydraException or OmegaConfBaseException."""
        GlobalHydra.instance().clear()
        try:
            with (
                strict_booleans(),
                replaceable_kinds(),
                option_files(self),
                initialize_config_dir(str(self.main_folder), job_name=self.name, version_base="1.3"),
                conf_resolvers(),  # Hydra resolves the value of a key that an override adds
            ):
                overrides = list(overrides)
                cfg = compose(self.name, overrides=[*self.search_path, *overrides], return_hydra_config=True)
        except OmegaConfBaseException:
            raise
        except (ValueError, YAMLError) as error:  # Hydra's error for parallelism=3; an invalid YAML file
            raise HydraException(str(error)) from error
        option = str(OmegaConf.select(cfg, "hydra.runtime.choices.model"))
        with open_dict(cfg):
            cfg.pop("hydra", None)
        files = (folder / "model" / f"{option}.yaml" for folder in self.folders)
        if file := next((file for file in files if file.is_file()), None):
            with suppress(OSError, UnicodeDecodeError, YAMLError):
                drop_sizes(cfg, load_yaml(file.read_text("utf-8")), overrides)
        return cfg

    def note_replaced(self, folder: Path, name: str) -> None:
        """Note the other files that have this name, but other content than the one in `folder`, which is used."""
        used = (folder / name).read_bytes()
        others = [other / name for other in self.folders if other != folder and (other / name).is_file()]
        for other in others:
            line = f"{folder / name}: used instead of {other}"
            if line not in self.replaced and other.read_bytes() != used:
                self.replaced.append(line)


def drop_sizes(cfg: DictConfig, option: Any, overrides: Iterable[str]) -> None:
    """Set the sizes that a model's option states to null if `model.path` is another model than the option's.

    Sizes of the wrong model would reject meshes that the model can have. Sizes among the overrides are kept.

    Args:
        cfg: A composed config.
        option: Values of the section `model` before `model.path` was set; anything but a dict is ignored.
    """
    model = cfg.get("model")
    if not isinstance(option, dict) or not isinstance(model, DictConfig):
        return
    values: Any = OmegaConf.to_container(model)
    if values.get("path") == option.get("path"):
        return
    given = {override_parts(override)[0] for override in overrides}
    for name in (each.name for each in fields(ModelShape)):
        stated = option.get(name)
        if stated is not None and values.get(name) == stated and f"model.{name}" not in given:
            model[name] = None


@contextmanager
def conf_resolvers() -> Iterator[None]:
    """Register the resolvers of conf/ within the block: `unless_epochs` and `with_kto`."""

    def unless_epochs(steps: int, *, _parent_: DictConfig) -> int | None:
        return steps if _parent_.get("epochs") is None else None

    def with_kto(column: str, *, _root_: DictConfig) -> str | None:
        return column if OmegaConf.select(_root_, "objective.kind") == ObjectiveKind.kto else None

    OmegaConf.register_new_resolver(_UNLESS_EPOCHS, unless_epochs, replace=True)
    OmegaConf.register_new_resolver(_WITH_KTO, with_kto, replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver(_UNLESS_EPOCHS)
        OmegaConf.clear_resolver(_WITH_KTO)


def register_schemas(name: str, schema: type[RecipeConfig]) -> None:
    """Register the dataclasses for defaults lists: schema/<name>, and schema/<section>/<kind> for options.

    If a recipe's config uses a subclass of a kind, the subclass is registered, so that the kind's options apply to it.
    """
    _register("schema", name, schema, package="_global_")
    annotations = [hint for hint in type_hints(schema).values() if isinstance(hint, type)]
    for section, kinds in KINDS.items():
        for kind, each in kinds.items():
            registered = next((hint for hint in annotations if issubclass(hint, each)), each)
            _register(f"schema/{section}", str(kind), registered)


def _register(group: str, name: str, schema: type, package: str | None = None) -> None:
    """Register one dataclass, unless it is registered already: each takes omegaconf 5 to 40 ms."""
    store = ConfigStore.instance()
    registered: Any = store.repo
    for part in (*group.split("/"), f"{name}.yaml"):
        registered = registered.get(part, {})
    if not registered or OmegaConf.get_type(registered.node) is not schema:
        store.store(group=group, name=name, node=schema, package=package)


@contextmanager
def option_files(request: Request) -> Iterator[None]:
    """Let Hydra search the folders in their order, and read texts as they were written.

    Hydra searches the main config's folder first, and merges what YAML 1.1 has made of a text (43200 for 12:00:00).
    """
    initialize, load = ConfigRepository.initialize_sources, ConfigLoaderImpl._load_single_config
    order = {f"{folder}": number for number, folder in enumerate(request.folders)}

    def initialize_in_order(repository: ConfigRepository, search_path: ConfigSearchPath) -> None:
        initialize(repository, search_path)
        *sources, schemas = repository.sources
        repository.sources = [
            *sorted(sources, key=lambda each: order.get(each.path.removeprefix("file://"), -1)),
            schemas,
        ]

    def load_as_written(loader: ConfigLoaderImpl, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = load(loader, default, repo)
        folder, name = Path(str(result.path).removeprefix("file://")), f"{default.config_path}.yaml"
        if folder not in request.folders:
            return result
        request.note_replaced(folder, name)
        package = default.package if default.package is not None else result.header["package"] or ""
        values = yaml_with_texts((folder / name).read_text(encoding="utf-8"), request.schema, package)
        if values is None:
            return result
        values.pop("defaults", None)
        result = copy.copy(result)
        result.config = OmegaConf.create(values)
        return loader._embed_result_config(result, package)

    ConfigRepository.initialize_sources = initialize_in_order  # type: ignore[method-assign,assignment]
    ConfigLoaderImpl._load_single_config = load_as_written  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ConfigRepository.initialize_sources = initialize  # type: ignore[method-assign]
        ConfigLoaderImpl._load_single_config = load  # type: ignore[method-assign]


@contextmanager
def strict_booleans() -> Iterator[None]:
    """Make omegaconf reject numbers for booleans; it would read `plot: 2` as true.

    Patches the class, because omegaconf recreates the nodes of a section whenever another config is merged into it.
    """
    convert = BooleanNode._validate_and_convert_impl

    def convert_strictly(node: BooleanNode, value: Any) -> Any:
        if type(value) is int or (isinstance(value, str) and value.isdecimal()):
            raise ValidationError("Value '$VALUE' is not a valid bool (type $VALUE_TYPE)")
        return convert(node, value)

    BooleanNode._validate_and_convert_impl = convert_strictly  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        BooleanNode._validate_and_convert_impl = convert  # type: ignore[method-assign]


@contextmanager
def replaceable_kinds() -> Iterator[None]:
    """Let an option replace the default kind of a section, including its keys.

    Hydra merges the option (`defaults: [/schema/optimizer/KIND@_here_, _self_]`) into the section's default. omegaconf
    only allows to merge a dataclass into its base class, and keeps the keys of the target. The patched check first
    replaces the target by an instance of the option's class.
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


def config_folders(name: str, recipe_dir: Path, given: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the config folders in search order.

    They are `given`, ./conf, conf/ next to the recipe, and conf/ of this project, so that a file of the user replaces a
    built-in one of its name. Raises ConfigError if none holds <name>.yaml, or if the aliases of a YAML file exceed the
    limits of safe_yaml.py.
    """
    nearby = [path.resolve() for path in (Path.cwd() / "conf", recipe_dir / "conf") if path.is_dir()]
    folders = list(dict.fromkeys([*given, *(path for path in nearby if path != CONF), CONF]))
    if not any((folder / f"{name}.yaml").is_file() for folder in folders):
        searched = ", ".join(map(str, folders))
        raise ConfigError(f"{name}.yaml: no such config in {searched}; add it, or set --config-dir")
    for folder in folders:
        if folder != CONF:
            _check_aliases(folder)
    return tuple(folders)


def _check_aliases(folder: Path) -> None:
    """Reject a folder with a file whose aliases or depth Hydra would follow without limit; leave others to Hydra."""
    for file in sorted(folder.rglob("*.yaml")):
        with suppress(OSError, UnicodeDecodeError, YAMLError):
            try:
                check_expansion(read_regular(file, _LARGEST).decode())
            except YamlLimitError as error:
                raise ConfigError(f"{file}: {error}; write the values without aliases, or remove the file") from error
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EFBIG, errno.ENXIO):  # reading it would not end
                    raise ConfigError(f"{file}: {error.strerror}; remove it from the folder of configs") from error


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
    groups, known, listed = option_groups(folders), option_groups([CONF]), _listed_groups(name, folders)
    return {group: options for group, options in groups.items() if group in listed or group not in known}


def _listed_groups(name: str, folders: Sequence[Path]) -> set[str]:
    """Return the groups in the defaults list of a main config, and of those that it includes."""
    file = next((file for folder in folders if (file := folder / f"{name}.yaml").is_file()), None)
    try:
        entries = (load_yaml(file.read_text("utf-8")) or {}).get("defaults", []) if file else []
    except (OSError, UnicodeDecodeError, YAMLError, AttributeError):
        return set()  # the composition reports the file
    groups: set[str] = set()
    for entry in entries:
        if isinstance(entry, dict):
            groups |= {str(key).split()[-1].partition("@")[0].lstrip("/") for key in entry}
        elif entry not in ("_self_", name):
            groups |= _listed_groups(str(entry).split()[-1].partition("@")[0].lstrip("/"), folders)
    return groups


def option_texts(folders: Iterable[Path], group: str) -> dict[str, str]:
    """Return the file content of each option of a group by name; the first folder takes precedence."""
    texts: dict[str, str] = {}
    for folder in folders:
        for file in sorted((folder / group).glob("*.yaml")):
            with suppress(OSError, UnicodeDecodeError):
                texts.setdefault(file.stem, file.read_text("utf-8"))
    return texts
