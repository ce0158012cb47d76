"""Ranks started by the user's own torchrun or srun: rank 0 composes and broadcasts the config, every rank runs main."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from components.config.compose.frozen import from_yaml, to_yaml
from components.launch.backend import CheckedRun, Recipe
from components.launch.open_run import open_run
from components.launch.rank import die_with, restrict_new_files, run_here
from components.launch.run_checks import OFFLINE, is_offline
from components.launch.run_directory.directory import RunDirectory
from components.protocol.console_log import keep_console
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.role import current_rank, rank_and_size, whole_number
from components.protocol.run_files import log_file
from components.terminal import keep_running, print_text

AGENT = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun's agent, the parent process of its ranks, sets for them."""


def run_attached(recipe: Recipe) -> int:
    """Run main on a rank of the user's launcher, with the config that rank 0 composed; return the exit status.

    If rank 0 rejects the config or only prints it (`--cfg job`), every rank exits with rank 0's status.
    """
    keep_running()
    if AGENT in os.environ:
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
    except SystemExit as end:  # an option unknown to Hydra, or --version
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
