"""Rendering of the batch script from slurm/train.sbatch.j2 or the user's own template; options of sbatch and srun."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config.schema.cluster import ClusterConfig, Device
from components.config.schema.schedulers import ContainerRuntime, GpuRequest, Launcher
from components.launch.job.scheduler import render_template
from components.package import COMPONENTS, PROJECT
from components.protocol.errors import ConfigError, field_values
from components.protocol.run_files import LOGS

TEMPLATE = PROJECT / "slurm" / "train.sbatch.j2"
Option = tuple[str, str]
"""Name of a long option, and its value; empty for a flag."""
_MODULE = re.compile(r"-m (components(?:\.\w+)*)")
_PLAIN = re.compile(r"[\w.,:;&|()\[\]+=@%/^~-]+", re.ASCII)


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


def render_script(job: BatchScript) -> str:
    """Return the batch script. Raises ConfigError if the template does not render, or the script does not parse or
    calls a module that does not exist."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    file = Path(os.path.expanduser(job.cluster.template or TEMPLATE))
    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quote": _as_word, "words": lambda texts: " ".join(map(_as_word, texts))}
    script = render_template(environment, file, _values(job))
    _check_syntax(script, f"cluster.template={file}")
    gone = [name for name in _MODULE.findall(script) if not _exists(name)]
    if gone:
        raise ConfigError(
            f"cluster.template={file}: calls {gone[0]}, which is no module of this version; copy {TEMPLATE} again, and "
            "repeat your changes in the copy"
        )
    return script


def _exists(module: str) -> bool:
    path = COMPONENTS.parent / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


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


def _as_word(value: object) -> str:
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
    container = _container_arguments(cluster, needed, job.folder)
    python = cluster.python or (sys.executable if runtime == ContainerRuntime.none else "python")
    return {
        "sbatch": [_as_line(option) for option in _job_options(cluster, job.name, job.run_dir, job.folder)],
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
        reason = next(line for line in done.stderr.splitlines() if "warning" not in line).removeprefix("bash: ")
        raise ConfigError(f"{what}: bash cannot parse it: {reason}")


def resource_options(cluster: ClusterConfig) -> list[Option]:
    """Return the sbatch options for nodes, tasks, GPUs, time and account, ending with cluster.sbatch_extra."""
    by_agent = cluster.launcher == Launcher.torchrun
    procs = int(cluster.procs_per_node)
    options: list[Option] = [("nodes", cluster.nodes)]
    if cluster.fewest_nodes == cluster.most_nodes:
        options.append(("ntasks-per-node", "1" if by_agent else str(procs)))
    else:  # given tasks, Slurm 22.05 allocates only as many nodes as those of the smallest number need
        options.append(("mincpus", str(procs * (cluster.cpus_per_proc or 1))))
    if cluster.cpus_per_proc is not None:
        options.append(("cpus-per-task", str(cluster.cpus_per_proc * (procs if by_agent else 1))))
    if cluster.device != Device.cpu and cluster.gpu_request != GpuRequest.none:
        requests = {
            GpuRequest.gres: ("gres", f"gpu:{procs}"),
            GpuRequest.gpus_per_task: ("gpus-per-task", str(procs if by_agent else 1)),
        }
        options.append(requests.get(cluster.gpu_request, ("gpus-per-node", str(procs))))
    keys = ("mem", "time", "partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation")
    values = field_values(cluster)
    options += [(key, values[key]) for key in keys if values[key] is not None]
    if cluster.exclusive:
        options.append(("exclusive", ""))
    # Flags last, so that sbatch --test-only rejects one that needs a value instead of consuming the next option.
    flags_last = sorted(cluster.sbatch_extra.items(), key=lambda item: not item[1])
    return options + [(name, value or "") for name, value in flags_last]


def _job_options(cluster: ClusterConfig, name: str, run_dir: Path, folder: Path) -> list[Option]:
    """Return all sbatch options of the job: resources, name, log and signal."""
    return [
        ("job-name", name),
        *resource_options(cluster),
        ("chdir", str(folder)),
        ("output", str(run_dir / LOGS / "job.log")),
        ("open-mode", "append"),
        ("signal", f"USR2@{cluster.signal_lead_seconds}"),
        ("requeue" if cluster.requeue.node_failure else "no-requeue", ""),
    ]


def _as_line(option: Option) -> str:
    """Return an option for an #SBATCH line, where sbatch splits at spaces and interprets quotes and backslashes."""
    name, value = option
    if not value:
        return f"--{name}"
    if _PLAIN.fullmatch(value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def as_argument(option: Option) -> str:
    """Return an option as a command-line argument."""
    name, value = option
    return f"--{name}={value}" if value else f"--{name}"


def _container_arguments(cluster: ClusterConfig, needed: Iterable[Path], folder: Path) -> list[str]:
    """Return the arguments of the container runtime: those of srun for pyxis, the prefix of Python for apptainer.

    Args:
        cluster: Settings with the image and the user's mounts.
        needed: Folders to mount in addition.
        folder: Working directory, in which the user ran the command; also mounted.
    """
    container = cluster.container
    mounts = list(dict.fromkeys([*container.mounts, *map(str, needed), str(folder)]))
    if container.runtime == ContainerRuntime.pyxis:
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        where = [f"--container-mounts={pairs}", f"--container-workdir={folder}"]
        return [f"--container-image={container.image}", *where, *container.args]
    if container.runtime == ContainerRuntime.apptainer:
        binds = [f"--bind={mount}" for mount in mounts]
        return ["apptainer", "exec", *binds, f"--pwd={folder}", *container.args, str(container.image)]
    return []
