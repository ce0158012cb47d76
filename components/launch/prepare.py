"""From a command line to a run directory: composed, checked, guarded, frozen. Nothing is written before it holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field

from components.config.compose.command_line import compose_from_command_line
from components.config.errors import ConfigError
from components.config.micro_batches import fit_micro_batches
from components.config.schema.cluster import ClusterKind
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.training import TrainingConfig
from components.launch.hub_access import OFFLINE, check_hub, is_offline
from components.launch.preflight import decides, local_problems, problems_before_start
from components.launch.processes import processes_of, visible_gpus
from components.launch.rank import Recipe, restrict_new_files
from components.launch.record import start_record
from components.launch.run_directory import RunDirectory, check_run_directory, open_run_directory
from components.terminal import print_text


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may start."""

    cfg: RecipeConfig
    directory: RunDirectory
    processes: int
    notes: list[str] = field(default_factory=list)
    """What Slurm and the paths say, for a person to know."""


def prepare(recipe: Recipe, world_size: int | None = None) -> Prepared | None:
    """Compose, check, and make the run directory; None where there is nothing to start (--cfg job, dry_run).

    Args:
        recipe: The decorated main.
        world_size: Number of ranks where they exist already; None: they are to be started, here or by Slurm.

    Raises ConfigError with every problem, and SystemExit for an option that Hydra does not know.
    """
    gpus = visible_gpus(os.environ)
    notes: list[str] = []

    def count_processes(cfg: RecipeConfig) -> int:
        return world_size or processes_of(cfg, gpus)

    def check(cfg: RecipeConfig, refused: Collection[str]) -> list[str]:
        if not _submits(cfg) and world_size is None:
            problems = local_problems(cfg, gpus, refused)
        else:
            problems = problems_before_start(cfg, count_processes(cfg), refused)
        if problems or refused:  # else the run directory is checked when it is opened
            named = {problem.partition("=")[0] for problem in problems}
            problems += [each for each in _directory_problems(cfg, recipe.name) if each.partition("=")[0] not in named]
        if not _submits(cfg):
            return problems
        if world_size is not None:
            return [f"cluster.kind=slurm: this is one of {world_size} ranks already; set cluster=local", *problems]
        from components.launch.slurm.preflight import job_problems

        unfit, notes[:] = job_problems(cfg, ask_slurm=not decides(refused, ["cluster"]))
        return problems + unfit

    cfg = compose_from_command_line(recipe.name, recipe.schema, recipe.file.parent, check)
    if cfg is None:
        return None
    if not _submits(cfg) and (why := check_hub(cfg, os.environ)) and not is_offline(os.environ):
        os.environ[OFFLINE] = "1"
        notes.append(f"the hub cannot be reached ({why}): only its cache is used ({OFFLINE}=1)")
    processes = count_processes(cfg)
    cfg, asked = fit_micro_batches(cfg, processes), cfg
    notes += _told_of_batches(asked, cfg)
    if cfg.cluster.dry_run:
        check_run_directory(cfg, recipe.name)
        _show(recipe, cfg, processes, notes)
        return None
    restrict_new_files(cfg)
    directory = open_run_directory(cfg, recipe.name)
    directory.freeze(cfg, start_record(recipe.name, recipe.file, processes, directory.attempt))
    if not _submits(cfg):
        where = f", logs of the other ranks in {directory.logs}" if processes > 1 else ""
        print_text(f"run {directory.path}: {describe_processes(processes)}{where}", file=sys.stderr)
        print_text(*notes, sep="\n", end="\n" * bool(notes), file=sys.stderr)
    return Prepared(cfg, directory, processes, notes)


def _directory_problems(cfg: RecipeConfig, recipe: str) -> list[str]:
    try:
        check_run_directory(cfg, recipe)
    except ConfigError as error:
        return error.problems
    return []


def _submits(cfg: RecipeConfig) -> bool:
    return cfg.cluster.kind == ClusterKind.slurm


def _told_of_batches(asked: RecipeConfig, cfg: RecipeConfig) -> list[str]:
    before, after = section(asked, TrainingConfig), section(cfg, TrainingConfig)
    if before is None or after is None or before == after:
        return []
    size, fitting = before.micro_batch_size, after.micro_batch_size
    return [
        f"training.micro_batch_size={size}: more than fits on this mesh; {fitting} at a time, which changes no result"
    ]


def _show(recipe: Recipe, cfg: RecipeConfig, processes: int, notes: list[str]) -> None:
    """Tell what would start."""
    if _submits(cfg):
        from components.launch.slurm.submit import show

        show(recipe, cfg, notes)
        return
    place = cfg.run.dir or f"a new folder in outputs/{recipe.name}"
    print_text(
        f"cluster.dry_run=true: would start {processes} x {recipe.file}, mesh {cfg.parallelism.resolve(processes)}, "
        f"run directory {place}",
        *notes,
        sep="\n",
    )
