"""Ranks that the user's own torchrun or srun started: rank 0 composes and distributes the config, all run main."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from components.config.compose.frozen import from_yaml, to_yaml
from components.config.errors import ConfigError
from components.launch.backend import CheckedRun, Recipe
from components.launch.open_run import open_run
from components.launch.rank import die_with, restrict_new_files, run_here
from components.launch.run_directory.directory import RunDirectory
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.failures import print_problems
from components.protocol.role import rank_and_size
from components.terminal import print_text

AGENT = "TORCHELASTIC_RUN_ID"
"""Set for the ranks of torchrun, whose parent is its agent: one that is killed would leave them running."""


def run_attached(recipe: Recipe) -> int:
    """Run main as one of the user's ranks, with the config that rank 0 composed; return the exit status.

    Where rank 0 refuses or only answers (`--cfg job`), every rank ends with rank 0's status.
    """
    if AGENT in os.environ:
        die_with(os.getppid())
        if _agent_is_gone():  # before that: it would hold the run directory, and wait for ranks that never come
            print_text("torchrun's agent ended before this rank could start", file=sys.stderr)
            return 1
    rank, world_size = rank_and_size(os.environ)
    return _lead(recipe, world_size) if rank == 0 else _follow(recipe)


def _lead(recipe: Recipe, world_size: int) -> int:
    run, status = None, 1
    try:
        run, status = open_run(recipe, world_size), 0
    except ConfigError as error:
        print_problems(error.problems)
        status = EXIT_INVALID
    except SystemExit as end:  # an option that Hydra does not know, or --version
        status = end.code if isinstance(end.code, int) else 1
    finally:  # the others wait for an answer even if this failed
        note = {"status": status} if run is None else _note(run)
        if world_size > 1:
            _broadcast(json.dumps(note))
    return status if run is None else run_here(recipe, run.cfg, run.directory)


def _follow(recipe: Recipe) -> int:
    note = json.loads(_broadcast(None))
    if "status" in note:
        return note["status"]
    directory = RunDirectory(
        Path(note["run_dir"]),
        fresh=note["fresh"],
        created=[Path(folder) for folder in note["created"]],
        lock=None,
        attempt=note["attempt"],
    )
    cfg = from_yaml(note["config"], recipe.schema)
    restrict_new_files(cfg)
    return run_here(recipe, cfg, directory)


def _agent_is_gone() -> bool:
    """Return whether nothing listens where torchrun's agent serves the store, as it does before it starts a rank."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # unknown here; joining the store will report it
    return False


def _broadcast(text: str | None) -> str:
    """Return rank 0's text on every rank."""
    # This process is a rank, which needs torch anyway; a launcher never comes here.
    from components.distributed.process.process_group import exchange_text_from_rank_zero

    return exchange_text_from_rank_zero(text)


def _note(run: CheckedRun) -> dict[str, Any]:
    directory = run.directory
    return {
        "config": to_yaml(run.cfg),
        "run_dir": str(directory.path),
        "fresh": directory.fresh,
        "created": [str(folder) for folder in directory.created],
        "attempt": directory.attempt,
    }
