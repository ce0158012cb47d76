"""Slurm's commands as processes, in an environment without the variables of a surrounding job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.config.errors import ConfigError
from components.protocol.role import without_ranks

TIMEOUT = 75.0
"""Seconds that a controller may take to answer."""


class NoAnswer(ConfigError):
    """The controller did not answer in time: it may still carry out the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Exit status and output of a command."""

    status: int
    output: str
    errors: str


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a job or step around us: submitted from there, a job would inherit them."""
    return {
        name: value
        for name, value in without_ranks(environ).items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }


def ask(command: Sequence[str], script: str = "") -> Answer:
    """Run a command of Slurm's with `script` as its input.

    Raises ConfigError where it is not installed or SLURM_CONF is no file (it would look for a minute), and NoAnswer
    where the controller does not answer.
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
            restore_signals=False,  # a busy controller hangs up, and Slurm's commands would die of SIGPIPE
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:  # the latter: of a folder of PATH that may not be searched
        raise ConfigError(
            f"cluster.kind=slurm: there is no {command[0]} on PATH; submit from a login node of the cluster, or set "
            "cluster=local"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(
            f"cluster.kind=slurm: {command[0]} has not answered for {TIMEOUT:g} s; is the controller up (sinfo)?"
        ) from error
    return Answer(done.returncode, done.stdout.strip(), done.stderr.strip())
