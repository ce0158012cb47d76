"""The config as options of sbatch and srun."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from components.config.schema.checks import field_values
from components.config.schema.cluster import ClusterConfig, Device
from components.config.schema.schedulers.slurm import ContainerRuntime, GpuRequest, Launcher
from components.protocol.run_files import LOGS

Option = tuple[str, str]
"""Name of a long option, and its value; empty for a flag."""

_PLAIN = re.compile(r"[\w.,:;&|()\[\]+=@%/^~-]+", re.ASCII)


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
        by_gres = cluster.gpu_request == GpuRequest.gres
        options.append(("gres", f"gpu:{procs}") if by_gres else ("gpus-per-node", str(procs)))
    keys = ("mem", "time", "partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation")
    values = field_values(cluster)
    options += [(key, values[key]) for key in keys if values[key] is not None]
    if cluster.exclusive:
        options.append(("exclusive", ""))
    # Flags last, so that sbatch --test-only rejects one that needs a value instead of consuming the next option.
    flags_last = sorted(cluster.sbatch_extra.items(), key=lambda item: not item[1])
    return options + [(name, value or "") for name, value in flags_last]


def job_options(cluster: ClusterConfig, name: str, run_dir: Path, folder: Path) -> list[Option]:
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


def as_line(option: Option) -> str:
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


def container_arguments(cluster: ClusterConfig, needed: Iterable[Path], folder: Path) -> list[str]:
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
