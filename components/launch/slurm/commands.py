"""Slurm commands as child processes, in an environment without the variables of a surrounding job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.config.errors import ConfigError
from components.protocol.role import without_ranks

TIMEOUT = 75.0
"""Timeout of a command in seconds."""
WITHOUT_CLUSTER = "set cluster=local, or only print the script here: cluster.dry_run=render"
"""Advice on a machine from which Slurm cannot be reached."""


class NoResponse(ConfigError):
    """The controller did not respond in time; it may still carry out the request."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status, stdout and stderr of a command."""

    status: int
    output: str
    errors: str


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a surrounding job or step, which a job submitted from it would inherit."""
    return {
        name: value
        for name, value in without_ranks(environ).items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }


def run_slurm(command: Sequence[str], script: str = "") -> CommandResult:
    """Run a Slurm command with `script` as its stdin.

    Raises ConfigError if the command is not installed or SLURM_CONF is not a file (Slurm would retry for a minute), and
    NoResponse if the controller does not respond in time.
    """
    conf = os.environ.get("SLURM_CONF")
    if conf and not os.path.isfile(conf):
        raise ConfigError(f"SLURM_CONF={conf}: no such file; unset it, or set it to the cluster's slurm.conf")
    try:
        done = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=clean_environment(os.environ),
            restore_signals=False,  # a busy controller closes connections: SIGPIPE must not kill
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:  # the latter if a folder in PATH is not searchable
        raise ConfigError(
            f"cluster.kind=slurm: there is no {command[0]} on PATH; submit from a login node of the cluster, "
            f"{WITHOUT_CLUSTER}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoResponse(
            f"cluster.kind=slurm: {command[0]} did not respond within {TIMEOUT:g} s; check the controller with sinfo"
        ) from error
    return CommandResult(done.returncode, done.stdout.strip(), done.stderr.strip())
