"""Checks of the data before launch, on a login node, without torch and pyarrow."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path

from components.config.kinds import of_source
from components.config.schema.data import (
    BadRows,
    CustomDataConfig,
    DataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    TokensDataConfig,
    UnusedKeys,
)
from components.config.schema.model import ModelConfig
from components.config.schema.rollouts import PromptsDataConfig, RewardFunctionsConfig, RewardName
from components.data.sources.columns import answer_configs, fitted
from components.data.sources.files import (
    TABLES,
    Location,
    check_columns,
    columns_of,
    content_format,
    is_local,
    read_rows,
)
from components.data.sources.rows import (
    BadRowReport,
    columns_optional,
    columns_wanted,
    eval_location,
    train_location,
    unused_problem,
)
from components.data.sources.split_files import files_of_split, object_problems
from components.data.token_store.manifest import hash_of_files, read_manifest, shard_problems, vocabulary_problems
from components.protocol.errors import ConfigError
from components.storage.object_store import is_url

_ROWS_CHECKED = 100  # rows at the beginning of a file that are read
_PARQUET_MAGIC = b"PAR1"  # the first and the last four bytes of a Parquet file


def check_files(cfg: DataConfig) -> list[str]:
    """Return the problems of the local files (or the factory) of `cfg`, one message each.

    The files of each split must exist, be readable and not empty. The first rows of the first file must have the
    configured columns, and parse unless bad rows are dropped; of Parquet files only the magic bytes are checked.
    Objects of a store must exist and not be empty. Hub datasets are not checked.
    """
    if isinstance(cfg, MixtureDataConfig):
        return [problem for name, source in cfg.sources.items() for problem in of_source(name, check_files(source))]
    if isinstance(cfg, CustomDataConfig):
        return _check_factory(cfg.factory)
    if not isinstance(cfg, RowsDataConfig):
        return []
    problems: list[str] = []
    for location in (train_location(cfg), eval_location(cfg)):
        if location is not None and is_local(location.path):
            try:
                problems += _check_location(cfg, location)
            except ConfigError as error:
                problems += error.problems
    return list(dict.fromkeys(problems))


def check_token_stores(cfg: DataConfig, model: ModelConfig, vocabulary_size: int | None) -> list[str]:
    """Return the problems of the token stores of `cfg`, one message each.

    The manifest must be readable, every shard must exist and have its size, and the ids must be those of the model's
    tokenizer and below `vocabulary_size`, as far as these are known before the model is loaded.
    """
    if isinstance(cfg, MixtureDataConfig):
        return [
            problem
            for name, source in cfg.sources.items()
            for problem in of_source(name, check_token_stores(source, model, vocabulary_size))
        ]
    if not isinstance(cfg, TokensDataConfig):
        return []
    problems, tokenizer_hash = list[str](), hash_of_files(model)
    for key, path in (("data.path", cfg.path), ("data.eval_path", cfg.eval_path)):
        if path is None:
            continue
        try:
            manifest = read_manifest(path, key)
        except ConfigError as error:
            problems += error.problems
            continue
        setting = f"{key}={path}"
        problems += shard_problems(manifest, setting)
        problems += vocabulary_problems(manifest, setting, size=vocabulary_size, tokenizer_hash=tokenizer_hash)
    return problems


def reward_columns(cfg: PromptsDataConfig) -> list[str] | None:
    """Return the columns of local rows as reward functions receive them; None if the rows are not local files.

    Raises ConfigError if the files of the split do not exist.
    """
    location = train_location(cfg)
    if not is_local(location.path) or is_url(location.path):
        return None
    columns = [name for name in columns_of(files_of_split(location)[0]) if name != cfg.prompt_column]
    return [*columns, *([] if cfg.answer_column is None or "answer" in columns else ["answer"])]


def check_reward_functions(cfg: RewardFunctionsConfig, columns: Collection[str] | None) -> list[str]:
    """Return the problems of the reward functions of `cfg`, one message each, without importing the user's code.

    A file must exist, be Python and define the function; the package of a module must be installed or in the current
    directory. Functions that compare with the data require the column `answer`.

    Args:
        cfg: The functions.
        columns: Columns of the data as functions receive them, that is with `answer` if data.answer_column is set; None
            if they are not known before launch.
    """
    problems = list[str]()
    compares = {RewardName.gsm8k, RewardName.number, RewardName.exact}
    if re.compile(cfg.pattern).groups:
        compares.add(RewardName.regex)
    for name in cfg.functions:
        module, _, function = name.rpartition(":")
        if name in compares and columns is not None and "answer" not in columns:
            present = ", ".join(columns) or "no column"
            problems.append(
                f"reward.functions={name}: compares with the column answer, but the data has {present} besides the "
                "prompt; set data.answer_column to the column with the correct answers"
            )
        elif module.endswith(".py"):
            problems += _check_function_file(f"reward.functions={name}", Path(module), function)
        elif module:
            package = module.partition(".")[0]
            if not PathFinder.find_spec(package, [os.getcwd()]) and not importlib.util.find_spec(package):
                problems.append(
                    f"reward.functions={name}: no module named {package!r}; install it, or put it into the current "
                    f"directory, {os.getcwd()}"
                )
    return problems


def _check_function_file(setting: str, file: Path, function: str) -> list[str]:
    """Require a Python file that binds the name of a function; it may do so by assignment or import."""
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        return [f"{setting}: {file.resolve()} cannot be read: {error.strerror or error}; correct the path"]
    except (SyntaxError, ValueError, RecursionError) as error:
        return [f"{setting}: {file} is not valid Python: {error}; correct it"]
    names = set(_bound_names(tree))
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name == function for node in tree.body):
        return [f"{setting}: is an async function; must be an ordinary one; call asyncio.run in it"]
    if function not in names and "*" not in names:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return [f"{setting}: {file} must define {function}; it defines {', '.join(functions) or 'no function'}"]
    return []


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that the statements of a module bind, also in blocks such as `if` and `try`; * for any."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name.partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from _bound_names(child)


def _check_location(cfg: RowsDataConfig, location: Location) -> list[str]:
    if is_url(location.path):
        return object_problems(location)
    files = files_of_split(location)
    problems = [problem for file in files for problem in _check_content(file, location)]
    if problems or content_format(files[0]) in TABLES:
        return problems
    columns = columns_of(files[0])
    if not columns:
        return [f"{location.key}={location.path}: {files[0].name} has no rows"]
    try:
        read = answer_configs(cfg, columns, str(files[0]))[0] if isinstance(cfg, PreferencesDataConfig) else cfg
        wanted = columns_wanted(read)
        problems = check_columns(wanted, columns, str(files[0]))
    except ConfigError as error:
        wanted, problems = {}, error.problems
    if problems:
        rows = [row.values for row in islice(read_rows(files[0]), _ROWS_CHECKED)]
        return fitted(problems, cfg, location.key, columns, rows)
    if cfg.bad_rows is BadRows.refuse:
        problems += _check_rows(files[0])
    if cfg.unused_keys is UnusedKeys.refuse and not isinstance(cfg, PromptsDataConfig):  # rewards use all columns
        unread = [name for name in columns if name not in (*wanted.values(), *columns_optional(cfg))]
        problems += [unused_problem(str(files[0]), [f"column {name}" for name in unread])] if unread else []
    return problems


def _check_rows(file: Path) -> list[str]:
    bad, rows = BadRowReport(), list(islice(read_rows(file), _ROWS_CHECKED))
    for row in rows:
        if row.problem:
            bad.add({row.where: row.problem})
    if not bad.count:
        return []
    return [
        f"data.bad_rows=refuse: {bad.count} of the first {len(rows)} rows of {file} cannot be read; correct these, or "
        f"set data.bad_rows=drop to leave such rows out:{bad}"
    ]


def _check_content(file: Path, location: Location) -> list[str]:
    try:
        with file.open("rb") as content:
            head = content.read(len(_PARQUET_MAGIC))
            if not head:
                return [f"{location.key}={location.path}: {file.name} is empty"]
            if content_format(file) == ".parquet":
                content.seek(-len(_PARQUET_MAGIC), 2)
                if not head == content.read() == _PARQUET_MAGIC:
                    return [f"{location.key}={location.path}: {file.name} is damaged or not a Parquet file"]
    except OSError as error:
        return [f"{location.key}={location.path}: {file.name} cannot be read: {error.strerror or error}"]
    return []


def _check_factory(factory: str) -> list[str]:
    package = factory.partition(":")[0].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return [f"data.factory={factory}: no module named {package!r}; install it, or put it next to the recipe"]
    return []
