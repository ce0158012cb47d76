"""Rendering of the batch script from slurm/train.sbatch.j2 or the user's own template."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config.errors import ConfigError
from components.config.schema.cluster import ClusterConfig, Device
from components.config.schema.schedulers.slurm import ContainerRuntime
from components.launch.schedulers.template import render_template
from components.launch.slurm.options import as_line, container_arguments, job_options
from components.project import PROJECT

TEMPLATE = PROJECT / "slurm" / "train.sbatch.j2"


@dataclass(frozen=True, slots=True)
class BatchScript:
    """Input of the batch script's template."""

    cluster: ClusterConfig
    node_counts: list[int]
    """Numbers of nodes on which the run can train; an attempt uses the largest that the job has."""
    name: str
    run_dir: Path
    attempt: int
    """Number of the job's first attempt; requeues use the following numbers."""
    code: Path
    """Folder to prepend to PYTHONPATH."""
    recipe: Path
    folder: Path
    """Working directory of the job: that of the launcher, so that relative paths stay valid."""
    private: bool = False
    """run.private: create files with owner-only permissions."""


def render(job: BatchScript) -> str:
    """Return the batch script. Raises ConfigError if the template does not render or the script does not parse."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    file = Path(os.path.expanduser(job.cluster.template or TEMPLATE))
    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quote": as_word, "words": lambda texts: " ".join(map(as_word, texts))}
    script = render_template(environment, file, _values(job))
    _check_syntax(script, f"cluster.template={file}")
    return script


def setup_problems(cluster: ClusterConfig) -> list[str]:
    """Return the lines of cluster.setup that are not complete shell commands by themselves.

    bash parses each line alone, and again inside braces, to detect a line that would consume the next one (<<, \\).
    """
    problems = []
    for line in cluster.setup:
        try:
            for script in (f"{line}\n", f"{{\n:\n{line}\n}}\n"):
                _check_syntax(script, f"cluster.setup={line!r}")
        except ConfigError as error:
            problems += error.problems
    return problems


def as_word(value: object) -> str:
    """Quote a value as one bash word on a single line: sbatch searches lines for its options and rejects CR LF."""
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_as_octal, text)) + "'"


def _as_octal(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def _values(job: BatchScript) -> dict[str, Any]:
    """Return the template's variables, all of which slurm/README.md documents."""
    cluster = job.cluster
    runtime = cluster.container.runtime
    needed = [job.run_dir] if cluster.snapshot else [job.run_dir, job.code, job.recipe.parent]
    container = container_arguments(cluster, needed, job.folder)
    python = cluster.python or (sys.executable if runtime == ContainerRuntime.none else "python")
    return {
        "sbatch": [as_line(option) for option in job_options(cluster, job.name, job.run_dir, job.folder)],
        "cluster": cluster,
        "node_counts": job.node_counts,
        "env": {**cluster.network_env, **cluster.env},
        "run_dir": job.run_dir,
        "private": job.private,
        "attempt": job.attempt,
        "code": job.code,
        "recipe": job.recipe,
        "python": python,
        "gpus": int(cluster.procs_per_node) if cluster.device != Device.cpu else 0,
        "pyxis": container if runtime == ContainerRuntime.pyxis else [],
        "apptainer": container if runtime == ContainerRuntime.apptainer else [],
    }


def _check_syntax(script: str, what: str) -> None:
    """Raise ConfigError, beginning with `what`, if bash cannot parse a script."""
    try:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise ConfigError(f"{what}: cannot be checked, since bash does not start: {error}") from error
    if done.returncode:
        why = next(line for line in done.stderr.splitlines() if "warning" not in line).removeprefix("bash: ")
        raise ConfigError(f"{what}: bash cannot parse it: {why}")
