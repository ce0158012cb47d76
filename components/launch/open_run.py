"""Compose and validate the config, then create, lock and populate the run directory.

Nothing is written until validation passes. Under the user's own torchrun or srun, rank 0 does this and broadcasts the
config, and every rank runs main.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from components.config.compose.command_line import REWRITTEN, Rewrite, Rewritten, compose_from_command_line
from components.config.compose.frozen import from_yaml, to_yaml
from components.config.mesh_rules import fit_micro_batches
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig, TrainConfig, section
from components.config.schema.run import CheckpointConfig, LoggingConfig
from components.config.schema.training import TrainingConfig
from components.config.stored_run import run_title
from components.launch.backend import CheckedRun
from components.launch.clusters import backend_of
from components.launch.machine import processes_of, visible_gpus
from components.launch.rank import die_with, restrict_new_files, run_here
from components.launch.recipe import Recipe
from components.launch.run_checks import (
    OFFLINE,
    check_hub,
    is_offline,
    memory_report,
    problems_before_start,
    simulated_memory,
    split_absent,
)
from components.launch.run_directory import RunDirectory, start_record
from components.launch.run_directory_lock import check_run_directory, open_run_directory
from components.protocol.console_log import keep_console
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.processes import current_rank, rank_and_size, whole_number
from components.protocol.run_files import MESH_PICTURE, log_file
from components.storage.object_store import package_problems
from components.terminal import keep_running, print_text

_AGENT = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun's agent, the parent process of its ranks, sets for them."""


def open_run(recipe: Recipe, world_size: int | None = None) -> CheckedRun | None:
    """Compose and check a run and create its directory; return None if nothing is to be started (--cfg job, dry_run).

    Args:
        recipe: The recipe.
        world_size: Number of ranks if they are already running; None if they are to be started.

    Raises ConfigError with all problems, and SystemExit for an option without its value.
    """
    gpus = visible_gpus(os.environ)
    notes: list[str] = []
    memory_notes: list[str] = []
    node_counts: list[int] = []

    def check(cfg: RecipeConfig, rejected: Collection[str]) -> list[str]:
        processes = world_size or processes_of(cfg, gpus)
        try:
            backend = backend_of(cfg.cluster)
        except ConfigError as error:  # of the user's own scheduler
            return error.problems + problems_before_start(cfg, processes, rejected)
        backend_problems: list[str] = []
        if world_size is None:
            backend_problems, notes[:] = backend.validate(cfg, processes, rejected)
        elif not backend.runs_here:
            backend_problems = [
                f"cluster.kind={cfg.cluster.kind}: this process is already one of {world_size} ranks; set cluster=local"
            ]
        problems, absent = split_absent(cfg, problems_before_start(cfg, processes, rejected, node_counts))
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

    cfg = compose_from_command_line(
        recipe.name,
        recipe.schema,
        recipe.file.parent,
        check,
        rewrite=_rewriting(recipe, world_size),
        description=recipe.description,
    )
    if cfg is None:
        return None
    backend, processes = backend_of(cfg.cluster), world_size or processes_of(cfg, gpus)
    if backend.runs_here and (reason := check_hub(cfg, os.environ)) and not is_offline(os.environ):
        os.environ[OFFLINE] = "1"
        notes.append(f"the hub cannot be reached ({reason}): using only its local cache ({OFFLINE}=1)")
    cfg, requested = fit_micro_batches(cfg, processes), cfg
    notes += [*_batch_notes(requested, cfg), *memory_notes]
    if cfg.cluster.starts_nothing:
        directory = check_run_directory(cfg, recipe.name)
        notes += simulated_memory(cfg, processes, recipe.file)
        backend.show(CheckedRun(recipe, cfg, directory, processes, notes, node_counts))
        return None
    restrict_new_files(cfg)
    _check_remote(cfg)
    directory = open_run_directory(cfg, recipe.name)
    ranks_per_node = processes // cfg.cluster.most_nodes if world_size is None else _ranks_per_node(world_size)
    planned, picture = _planned(cfg, processes, ranks_per_node, notes)
    record = start_record(recipe.name, recipe.file, processes, directory.attempt)
    directory.freeze(cfg, {**record, "planned": planned}, picture)
    if backend.runs_here:
        keep_console(log_file(directory.logs, 0))
        where = f", their logs in {directory.logs.relative_to(directory.path)}" if processes > 1 else ""
        print_text(f"run {directory.path}: {describe_processes(processes)}{where}", file=sys.stderr)
        logging = section(cfg, LoggingConfig)
        waits = sys.stderr.isatty() and logging is not None and not logging.quiet
        starting = ["starting: loading PyTorch, the data and the model"] * waits
        print_text(*notes, *starting, sep="\n", end="\n" * bool(notes or starting), file=sys.stderr, flush=True)
    return CheckedRun(recipe, cfg, directory, processes, notes, node_counts)


def _planned(
    cfg: RecipeConfig, processes: int, ranks_per_node: int, notes: list[str]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the estimates of memory and time if cluster.gpu is set, and for several processes the mesh as SVG."""
    if not isinstance(cfg, TrainConfig) or (cfg.cluster.gpu is None and processes == 1):
        return None, None
    from components.planning.formulas.ranking import estimate_run  # many runs need neither
    from components.planning.mesh_picture import picture_of_run, render_mesh

    mesh = cfg.parallelism.resolve(processes)
    estimate = estimate_run(cfg, mesh)
    planned = None if estimate is None else estimate.figures()
    if processes == 1:
        return planned, None
    title = run_title(cfg.model, cfg.data, mesh)
    try:
        return planned, render_mesh(picture_of_run(cfg, mesh, estimate, ranks_per_node, title))
    except (ValueError, ArithmeticError, LookupError) as error:  # a picture must not prevent the run
        notes.append(f"{MESH_PICTURE} is not drawn: {type(error).__name__}: {error}")
        return planned, None


def _ranks_per_node(world_size: int) -> int:
    """Return the ranks per node of the user's own launcher; all ranks if its variables do not say."""
    local, nodes = (whole_number(os.environ.get(name, "")) for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_NODES"))
    return local or max(1, world_size // (nodes or 1))


def _rewriting(recipe: Recipe, world_size: int | None) -> Rewrite:
    """Return what replaces parallelism=auto and run=RUN on the command line."""
    if not any(each.startswith(REWRITTEN) for each in sys.argv[1:]):
        return Rewritten
    from components.launch.overrides import rewriting  # few commands need the planner

    return rewriting(recipe, world_size)


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


def run_attached(recipe: Recipe) -> int:
    """Run main on a rank of the user's launcher, with the config that rank 0 composed; return the exit status.

    If rank 0 rejects the config or only prints it (`--cfg job`), every rank exits with rank 0's status.
    """
    keep_running()
    if _AGENT in os.environ:
        die_with(os.getppid())  # a killed agent would leave its ranks running
        # die_with misses an agent that ended earlier; this rank would then hold the run directory and wait forever.
        if _agent_is_gone():
            print_text("torchrun's agent exited before this rank started", file=sys.stderr)
            return 1
    rank, world_size = rank_and_size(os.environ)
    return _run_rank_zero(recipe, world_size) if rank == 0 else _run_other_rank(recipe)


def _run_rank_zero(recipe: Recipe, world_size: int) -> int:
    """Open the run, broadcast its description or the exit status, and run main."""
    run, status = None, 1
    try:
        run, status = open_run(recipe, world_size), 0
    except ConfigError as error:
        print_problems(error.problems)
        status = EXIT_INVALID
    except SystemExit as end:  # an option without its value
        status = end.code if isinstance(end.code, int) else 1
    finally:  # the other ranks block in the broadcast even if this failed
        message = {"status": status} if run is None else _describe_run(run)
        if world_size > 1:
            _broadcast(json.dumps(message))
    return status if run is None else run_here(recipe, run.cfg, run.directory)


def _run_other_rank(recipe: Recipe) -> int:
    """Receive the run from rank 0 and run main, or return rank 0's exit status."""
    message = json.loads(_broadcast(None))
    if "status" in message:
        return message["status"]
    directory = RunDirectory(
        Path(message["run_dir"]),
        fresh=message["fresh"],
        created=[Path(folder) for folder in message["created"]],
        lock=None,
        attempt=message["attempt"],
    )
    if message["offline"]:
        os.environ[OFFLINE] = "1"  # only rank 0 has checked the hub
    cfg = from_yaml(message["config"], recipe.schema)
    restrict_new_files(cfg)
    keep_console(log_file(directory.logs, current_rank(os.environ)))
    return run_here(recipe, cfg, directory)


def _agent_is_gone() -> bool:
    """Return whether the store of torchrun's agent, which is up before any rank starts, refuses connections."""
    host, port = os.environ.get("MASTER_ADDR", ""), whole_number(os.environ.get("MASTER_PORT", ""))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or port is None or port > 65535:
        return False
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # inconclusive: joining the store reports it
    return False


def _broadcast(text: str | None) -> str:
    """Return rank 0's text on every rank."""
    # Imported here because it imports torch: only ranks call this function, never a launcher.
    from components.distributed.process.process_group import exchange_text_from_rank_zero

    return exchange_text_from_rank_zero(text)


def _describe_run(run: CheckedRun) -> dict[str, Any]:
    """Return the config, run directory and whether ranks work offline as JSON-compatible values."""
    directory = run.directory
    return {
        "config": to_yaml(run.cfg),
        "run_dir": str(directory.path),
        "fresh": directory.fresh,
        "created": [str(folder) for folder in directory.created],
        "attempt": directory.attempt,
        "offline": is_offline(os.environ),
    }
