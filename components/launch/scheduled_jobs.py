"""Shared parts of the Slurm and Kubernetes backends: attempts of a job, checks of nodes and paths, and templates.

An attempt makes progress if it publishes a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.compose.frozen import read_section
from components.config.schema.checks import field_values
from components.config.schema.cluster import ClusterConfig
from components.config.schema.data import MixtureDataConfig
from components.config.schema.recipes import RecipeConfig, named_models
from components.config.schema.slurm import RequeueConfig
from components.kernel_counters import CpuLimitError, limited
from components.launch.machine import visible_gpus
from components.protocol.errors import ConfigError
from components.protocol.run_files import (
    CHECKPOINTS,
    FIRST_STEP,
    LOGS,
    attempt_logs,
    checkpoint_step,
    current_config,
    names_in,
    read_result,
    read_text,
)
from components.protocol.safe_json import read_regular

if TYPE_CHECKING:
    from jinja2 import Environment

JOB, CHECKPOINTS_BEFORE = "job", "checkpoints"
"""Files in an attempt's logs: the job id, and the entries of checkpoints/ at the start. Slurm's batch script or the
first pod writes them."""
_NEEDED_SHARED_MEMORY = 64 * 2**20
"""Minimum free bytes of /dev/shm, which data workers and NCCL use."""
LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "squashfs", "fuse.snapfuse"}
"""Types of file systems that other machines cannot access, unless this one exports them."""
_LARGEST = 1 << 20
"""Most bytes of a template, and of what it renders to; Slurm accepts scripts of 4 MiB."""
CPU_SECONDS = 5
"""Most CPU time that a template may take; the built-in ones take milliseconds."""
MEMORY = 1 << 29
"""Most bytes that a template may allocate."""


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One attempt of a job."""

    stepped: bool
    """Whether it finished an optimizer step."""
    progressed: bool
    """Whether it published a checkpoint."""
    status: str
    """Status in its result.json; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to change if attempts make no progress, in the terms of a scheduler; each completes a sentence."""

    longer_save: str
    """How to give a save more time."""
    longer_attempt: str
    """How to get attempts that last until their first step."""


def lack_of_progress(run_dir: Path, attempts: list[JobAttempt], remedies: Remedies) -> str | None:
    """Return why these attempts count as stuck, naming the limit and remedies; None if another one may start."""
    policy, section = requeue_policy(run_dir), "cluster.requeue"
    with_steps = without_steps = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        with_steps, without_steps = with_steps + attempt.stepped, without_steps + (not attempt.stepped)
    if with_steps >= policy.without_progress:
        return (
            f"{with_steps} attempts in a row took steps and published no newer checkpoint "
            f"({section}.without_progress={policy.without_progress}): save more often (checkpoint.every, "
            f"checkpoint.every_minutes), give a save more time ({remedies.longer_save}), or raise the limit"
        )
    if without_steps >= policy.before_first_step:
        return (
            f"{without_steps} attempts in a row were stopped before their first step "
            f"({section}.before_first_step={policy.before_first_step}): {remedies.longer_attempt}, or raise the limit"
        )
    return None


def attempts_of_job(run_dir: Path, attempt: int) -> list[JobAttempt]:
    """Return the attempts of the job that runs attempt number `attempt`, oldest first, up to that one.

    Empty if a batch script of the user's own does not write the files that this needs.
    """
    numbers = attempt_numbers(run_dir, attempt)
    if not numbers:
        return []
    starts = [_published(_lines(attempt_logs(run_dir, number) / CHECKPOINTS_BEFORE)) for number in numbers]
    starts.append(_published(names_in(run_dir / CHECKPOINTS)))
    return [
        JobAttempt(
            stepped=(logs / FIRST_STEP).exists() or (number == attempt and (run_dir / LOGS / FIRST_STEP).exists()),
            progressed=bool(after - before),
            status=str(read_result(run_dir if number == attempt else logs).get("status", "")),
        )
        for number, before, after in zip(numbers, starts[:-1], starts[1:], strict=True)
        for logs in [attempt_logs(run_dir, number)]
    ]


def attempt_numbers(run_dir: Path, attempt: int) -> list[int]:
    """Return the numbers of the attempts of the job that runs attempt number `attempt`, up to that one.

    Empty if a batch script of the user's own does not write the attempt's file `job`.
    """
    job = _lines(attempt_logs(run_dir, attempt) / JOB)
    return [number for number in range(attempt + 1) if job and _lines(attempt_logs(run_dir, number) / JOB) == job]


def requeue_policy(run_dir: Path) -> RequeueConfig:
    """Return the requeue policy in a run's config; the defaults if the config cannot be read."""
    cluster = cluster_of(run_dir)
    return RequeueConfig() if cluster is None else cluster.requeue


def cluster_of(run_dir: Path) -> ClusterConfig | None:
    """Return the section `cluster` of a run's config; None if the config cannot be read."""
    try:
        return read_section(current_config(run_dir), "cluster", ClusterConfig)
    except ConfigError:
        return None


def _published(names: list[str]) -> set[str]:
    """Return the names of published checkpoints, without temporary folders."""
    return {name for name in names if checkpoint_step(name) is not None}


def _lines(file: Path) -> list[str]:
    """Return the complete lines of a file; none if it does not exist."""
    return read_text(file).split("\n")[:-1]


def node_problems(run_dir: Path, gpus: int) -> list[str]:
    """Return the problems of this node or pod for a run that needs that many GPUs on it."""
    return [*_folder_problems(run_dir), *_gpu_problems(gpus), *_memory_problems()]


def _folder_problems(run_dir: Path) -> list[str]:
    if not run_dir.is_dir():
        return [f"cannot access the run directory {run_dir}; put run.dir on a file system that all nodes share"]
    try:
        with tempfile.TemporaryFile(dir=run_dir / LOGS) as file:
            file.write(b"written")
    except OSError as error:
        return [f"cannot write to the run directory {run_dir}: {error.strerror}"]
    return []


def _gpu_problems(gpus: int) -> list[str]:
    if not gpus:
        return []
    seen = visible_gpus(os.environ)
    if seen < gpus:
        return [f"has {seen} visible GPUs, but cluster.procs_per_node={gpus} requires one per process"]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return ["nvidia-smi did not respond within 60 s: a GPU may hang"]
    return [f"nvidia-smi failed: {listed.stderr.strip() or listed.stdout.strip()}"] if listed.returncode else []


def _memory_problems() -> list[str]:
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < _NEEDED_SHARED_MEMORY:
        return [f"/dev/shm has less than {_NEEDED_SHARED_MEMORY // 2**20} MiB free"]
    return []


def named_paths(cfg: RecipeConfig) -> dict[str, str | None]:
    """Return the paths that a config names, by key; a model's may be a name on the hub."""
    sources = cfg.data.sources if isinstance(cfg.data, MixtureDataConfig) else {}
    return {
        "run.dir": cfg.run.dir or str(Path.cwd()),
        **named_models(cfg),
        "data.path": field_values(cfg.data).get("path"),
        **{f"data.sources.{name}.path": field_values(each).get("path") for name, each in sources.items()},
    }


def _mounts() -> dict[str, str]:
    """Return the file system type of each mount point."""
    table = Path("/proc/self/mounts")
    lines = table.read_text().splitlines() if table.exists() else []
    return {entry[1].replace("\\040", " "): entry[2] for entry in map(str.split, lines) if len(entry) > 2}


def file_system(path: Path) -> str | None:
    """Return the type of the file system that contains a path; None if unknown."""
    absolute, mounts = path.absolute(), _mounts()
    return next((mounts[str(folder)] for folder in (absolute, *absolute.parents) if str(folder) in mounts), None)


def render_template(environment: Environment, file: Path, values: Mapping[str, Any]) -> str:
    """Return the rendered template. Raises ConfigError, also if it exceeds a limit."""
    from jinja2 import TemplateSyntaxError

    what = f"cluster.template={file}: cannot be rendered"
    try:
        source = read_regular(file, _LARGEST).decode()
        with limited(CPU_SECONDS, MEMORY):
            text = environment.from_string(source).render(values)
    except CpuLimitError as error:
        raise ConfigError(f"{what}: it takes more than {CPU_SECONDS} s of CPU time") from error
    except MemoryError as error:
        raise ConfigError(f"{what}: it takes more than {MEMORY >> 20} MiB of memory") from error
    except Exception as error:  # a template can raise anything: ZeroDivisionError, SecurityError
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{what}{line}: {str(error)[:1000]}") from error
    if len(text) > _LARGEST:
        raise ConfigError(f"{what}: it renders to more than {_LARGEST:,} characters")
    return text
