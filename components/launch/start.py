"""The start of a recipe: by the user's command, or on a rank of the user's own torchrun or srun.

Imports are local so that each way of starting imports only what it needs.
"""

from __future__ import annotations

import os
import signal
import sys

from components.launch.recipe import Recipe
from components.protocol.processes import LAUNCHER_PID, Role, detect_role
from components.terminal import exit_on_broken_pipe, keep_running


def start(recipe: Recipe) -> int:
    """Answer --help and --cfg, or run a sweep, or check a run and start it; return the exit status."""
    if detect_role(os.environ) is Role.attached:
        from components.launch.open_run import run_attached
        from components.launch.rank import end_rank

        end_rank(run_attached(recipe))
    from components.config.compose.command_line import (
        REWRITTEN,
        compose_from_command_line,
        is_answered,
        is_sweep_requested,
    )

    if is_answered() and not any(each.startswith(REWRITTEN) for each in sys.argv[1:]):
        with exit_on_broken_pipe():
            compose_from_command_line(recipe.name, recipe.schema, recipe.file.parent, description=recipe.description)
        return 0
    from components.launch.clusters import backend_of
    from components.launch.open_run import open_run
    from components.launch.rank import die_with, run_here

    if caller := os.environ.pop(LAUNCHER_PID, None):
        die_with(int(caller), signal.SIGTERM)  # a killed notebook saves and stops its run
    if is_sweep_requested():
        keep_running()
        from components.launch.sweep.command import run_sweep

        return run_sweep(recipe)
    with exit_on_broken_pipe():
        run = open_run(recipe)
    if run is None:
        return 0
    keep_running()
    return backend_of(run.cfg.cluster).submit(run, lambda: run_here(recipe, run.cfg, run.directory))
