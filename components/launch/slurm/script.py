"""Render the batch script: slurm/train.sbatch.j2, or the user's own template."""

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
from components.config.schema.slurm import ContainerRuntime
from components.launch.slurm.options import as_line, container_arguments, job_options
from components.launch.slurm.snapshot import PROJECT

TEMPLATE = PROJECT / "slurm" / "train.sbatch.j2"


@dataclass(frozen=True, slots=True)
class BatchScript:
    """Values from which the batch script is rendered."""

    cluster: ClusterConfig
    name: str
    run_dir: Path
    attempt: int
    """Of the first start; requeues count on."""
    code: Path
    """Folder that is put first on PYTHONPATH."""
    recipe: Path
    folder: Path
    """Where the command was typed: relative paths mean what they meant there."""
    private: bool = False
    """run.private: what the job writes is for its owner only."""


def render(job: BatchScript) -> str:
    """Return the script. Raises ConfigError where the template, or a shell line in it, does not parse."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    file = Path(os.path.expanduser(job.cluster.template or TEMPLATE))
    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quote": as_word, "words": lambda texts: " ".join(map(as_word, texts))}
    try:
        script = environment.from_string(file.read_text()).render(_values(job))
    except Exception as error:  # a template is a program: it may divide by zero, or be refused by the sandbox
        number = getattr(error, "lineno", None)
        line = f", line {number}" if number else ""
        raise ConfigError(f"cluster.template={file}: cannot be filled in{line}: {error}") from error
    _check_syntax(script, f"cluster.template={file}")
    return script


def setup_problems(cluster: ClusterConfig) -> list[str]:
    """Return which lines of cluster.setup are no complete shell commands by themselves.

    bash reads each alone, and once more in braces, which stay open where a line swallows what follows it (<<, \\).
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
    """Return a text as one word of bash on one line: in more lines sbatch would look for its options, and for CR LF."""
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_as_octal, text)) + "'"


def _as_octal(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def _values(job: BatchScript) -> dict[str, Any]:
    """The template's variables; every one of them is listed in slurm/README.md."""
    cluster = job.cluster
    runtime = cluster.container.runtime
    needed = [job.run_dir] if cluster.snapshot else [job.run_dir, job.code, job.recipe.parent]
    around = container_arguments(cluster, needed, job.folder)
    python = cluster.python or (sys.executable if runtime == ContainerRuntime.none else "python")
    return {
        "sbatch": [as_line(option) for option in job_options(cluster, job.name, job.run_dir, job.folder)],
        "cluster": cluster,
        "env": {**cluster.network_env, **cluster.env},
        "run_dir": job.run_dir,
        "private": job.private,
        "attempt": job.attempt,
        "code": job.code,
        "recipe": job.recipe,
        "python": python,
        "gpus": int(cluster.procs_per_node) if cluster.device != Device.cpu else 0,
        "pyxis": around if runtime == ContainerRuntime.pyxis else [],
        "apptainer": around if runtime == ContainerRuntime.apptainer else [],
    }


def _check_syntax(script: str, what: str) -> None:
    try:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise ConfigError(f"{what}: cannot be checked: bash does not start here: {error}") from error
    if done.returncode:
        why = next(line for line in done.stderr.splitlines() if "warning" not in line).removeprefix("bash: ")
        raise ConfigError(f"{what}: bash cannot read it: {why}")
