"""Compose and validate the config, then create, lock and populate the run directory.

Nothing is written until validation passes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from components.config.compose.command_line import compose_from_command_line
from components.config.mesh_names import fit_micro_batches
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.run import CheckpointConfig, LoggingConfig
from components.config.schema.training import TrainingConfig
from components.launch.backend import CheckedRun, Recipe
from components.launch.clusters import backend_of
from components.launch.machine import processes_of, visible_gpus
from components.launch.rank import restrict_new_files
from components.launch.run_checks import (
    OFFLINE,
    check_hub,
    is_offline,
    memory_report,
    played_memory,
    problems_before_start,
    split_absent,
)
from components.launch.run_directory.directory import start_record
from components.launch.run_directory.opening import check_run_directory, open_run_directory
from components.project import HELP
from components.protocol.console_log import keep_console
from components.protocol.errors import ConfigError
from components.protocol.run_files import log_file
from components.storage.urls import package_problems
from components.terminal import print_text


def open_run(recipe: Recipe, world_size: int | None = None) -> CheckedRun | None:
    """Compose and check a run and create its directory; return None if nothing is to be started (--cfg job, dry_run).

    Args:
        recipe: The recipe.
        world_size: Number of ranks if they are already running; None if they are to be started.

    Raises ConfigError with all problems, and SystemExit for an option unknown to Hydra.
    """
    gpus = visible_gpus(os.environ)
    notes: list[str] = []
    memory_notes: list[str] = []

    def check(cfg: RecipeConfig, rejected: Collection[str]) -> list[str]:
        backend, processes = backend_of(cfg.cluster.kind), world_size or processes_of(cfg, gpus)
        backend_problems: list[str] = []
        if world_size is None:
            backend_problems, notes[:] = backend.validate(cfg, processes, rejected)
        elif not backend.runs_here:
            backend_problems = [
                f"cluster.kind={cfg.cluster.kind}: this process is already one of {world_size} ranks; set cluster=local"
            ]
        problems, absent = split_absent(cfg, problems_before_start(cfg, processes, rejected))
        notes.extend(absent)
        if not (problems or absent or backend_problems or rejected):
            fewest = processes * cfg.cluster.fewest_nodes // cfg.cluster.most_nodes  # each rank holds the most
            problems, memory_notes[:] = memory_report(cfg, fewest, on_cluster=not backend.runs_here)
            if fewest < processes:
                memory_notes[:] = [f"on {cfg.cluster.fewest_nodes} nodes: {note}" for note in memory_notes]
        if backend_problems or problems or rejected:  # otherwise the run directory is checked when it is opened
            named = {problem.partition("=")[0] for problem in problems}
            problems += [each for each in directory_problems(cfg, recipe.name) if each.partition("=")[0] not in named]
        return backend_problems + problems

    with _planned_command_line(recipe, world_size), _evaluated_run(recipe) as folders:
        names = recipe.main.__globals__
        description = names.get(HELP) or names["__doc__"] or ""
        cfg = compose_from_command_line(recipe.name, recipe.schema, recipe.file.parent, check, folders, description)
    if cfg is None:
        return None
    backend, processes = backend_of(cfg.cluster.kind), world_size or processes_of(cfg, gpus)
    if backend.runs_here and (why := check_hub(cfg, os.environ)) and not is_offline(os.environ):
        os.environ[OFFLINE] = "1"
        notes.append(f"the hub cannot be reached ({why}): using only its local cache ({OFFLINE}=1)")
    cfg, requested = fit_micro_batches(cfg, processes), cfg
    notes += [*_batch_notes(requested, cfg), *memory_notes]
    if cfg.cluster.starts_nothing:
        directory = check_run_directory(cfg, recipe.name)
        notes += played_memory(cfg, processes, recipe.file)
        backend.show(CheckedRun(recipe, cfg, directory, processes, notes))
        return None
    restrict_new_files(cfg)
    _check_remote(cfg)
    directory = open_run_directory(cfg, recipe.name)
    directory.freeze(cfg, start_record(recipe.name, recipe.file, processes, directory.attempt))
    if backend.runs_here:
        keep_console(log_file(directory.logs, 0))
        where = f", their logs in {directory.logs.relative_to(directory.path)}" if processes > 1 else ""
        print_text(f"run {directory.path}: {describe_processes(processes)}{where}", file=sys.stderr)
        logging = section(cfg, LoggingConfig)
        waits = sys.stderr.isatty() and logging is not None and not logging.quiet
        starting = ["starting: loading PyTorch, the data and the model"] * waits
        print_text(*notes, *starting, sep="\n", end="\n" * bool(notes or starting), file=sys.stderr, flush=True)
    return CheckedRun(recipe, cfg, directory, processes, notes)


def _planned_command_line(recipe: Recipe, world_size: int | None) -> AbstractContextManager[None]:
    """Return a context in which the planner has chosen the mesh of `parallelism=auto`."""
    if not any(each.startswith(("parallelism=auto", "parallelism=plan:")) for each in sys.argv[1:]):
        return nullcontext()
    from components.launch.overrides import planned_command_line  # few commands need the planner

    return planned_command_line(recipe, world_size)


def _evaluated_run(recipe: Recipe) -> AbstractContextManager[tuple[Path, ...]]:
    """Return a context in which `run=RUN` is replaced by the run's settings; it yields the folders of their options."""
    if not any(each.startswith("run=") for each in sys.argv[1:]):
        return nullcontext(())
    from components.launch.overrides import evaluated_run  # few commands need it

    return evaluated_run(recipe.schema)


def directory_problems(cfg: RecipeConfig, recipe: str) -> list[str]:
    """Return the problems of the run directory of `cfg`, without creating it."""
    try:
        check_run_directory(cfg, recipe)
    except ConfigError as error:
        return error.problems
    return []


def _check_remote(cfg: RecipeConfig) -> None:
    """Raise ConfigError if checkpoint.remote belongs to another run or to none, as far as can be seen from here."""
    checkpoint = section(cfg, CheckpointConfig)
    url = None if checkpoint is None else checkpoint.remote
    if url is None or package_problems("checkpoint.remote", url):
        return
    from components.storage.run_claim import problem_before_launch  # few runs need the store's client

    run = "" if cfg.run.dir is None else os.path.abspath(os.path.expanduser(cfg.run.dir))
    if problem := problem_before_launch(url, run):
        raise ConfigError(problem)


def _batch_notes(requested: RecipeConfig, cfg: RecipeConfig) -> list[str]:
    """Return a note if the micro-batch size was reduced to fit the global batch and the mesh."""
    before, after = section(requested, TrainingConfig), section(cfg, TrainingConfig)
    if before is None or after is None or before == after:
        return []
    size, fitting = before.micro_batch_size, after.micro_batch_size
    return [
        f"training.micro_batch_size={size}: does not fit the global batch on this mesh; using {fitting}, which does "
        "not change results"
    ]
