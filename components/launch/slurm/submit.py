"""The Slurm scheduler: checks before submission, including sbatch --test-only, the submission, and Slurm's commands.

Commands run as child processes, in an environment without the variables of a surrounding job.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from components.config.model_files import locate
from components.config.schema.cluster import ClusterConfig
from components.config.schema.recipes import RecipeConfig, named_models
from components.config.schema.schedulers import ContainerRuntime
from components.launch.backend import CheckedRun, Job, JobState
from components.launch.job.scheduler import (
    LOCAL_FILE_SYSTEMS,
    ROOT,
    TAG,
    Findings,
    NoAnswer,
    Scheduler,
    file_system,
    named_paths,
)
from components.launch.run_checks import affects, hub_cache, is_offline
from components.launch.slurm.script import BatchScript, as_argument, render_script, resource_options, setup_problems
from components.protocol.errors import ConfigError, field_values
from components.protocol.processes import without_ranks
from components.protocol.run_files import LOGS, PRIVATE, SCRIPT, open_append

_LOST_ANSWERS = ("timed out", "Zero Bytes", "send/recv", "Unexpected message", "slurm controller", "onnection")
"""Substrings of sbatch's errors if the controller did not respond in time; it may have accepted the job."""
_UNREACHABLE = (
    *("cannot stat file", "configuration source", "configuration file", "Unable to contact slurm controller"),
    "slurm_load",
)
"""Substrings of sbatch's output if it cannot reach Slurm."""
_REASON = re.compile(r"^(sbatch|allocation failure|error|fatal|Batch job submission failed)[:\s]*", re.IGNORECASE)
_SUBMITTED = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
RUNNING = {*("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")}
_ENDED = {
    "COMPLETED": "ended",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
}
"""Final states. A state in none of these sets is reported as failed, without assuming that the job has ended."""
_GONE = "gone"
"""Slurm reports that it has no such job: it ended long ago."""
_UNKNOWN = "unknown"
"""Slurm does not respond."""
_TIMEOUT = 75.0
"""Timeout of a command in seconds."""
_WITHOUT_CLUSTER = "set cluster=local, or only print the script here: cluster.dry_run=render"
"""Advice on a machine from which Slurm cannot be reached."""


class SlurmScheduler(Scheduler):
    """Slurm: a batch script submitted with sbatch. Job ids are decimal numbers."""

    name, file = "Slurm", SCRIPT

    def problems(self, cfg: RecipeConfig, rejected: Collection[str]) -> Findings:
        """Check the script, paths and caches, and run sbatch --test-only. Notes: estimated start, local paths."""
        return job_problems(cfg, query=not affects(rejected, ["cluster"]))

    def render(self, run: CheckedRun, tag: str) -> str:
        """Return the batch script."""
        return render_script(
            BatchScript(
                cluster=run.cfg.cluster,
                node_counts=run.node_counts,
                name=run.cfg.run.name or run.recipe.name,
                run_dir=run.directory.path,
                attempt=run.directory.attempt,
                private=run.cfg.run.private,
                code=Path(self.code_folder(run)),
                recipe=self.recipe_file(run),
                folder=Path.cwd(),
            )
        )

    def new_tag(self, run: CheckedRun) -> str:
        """Return a unique comment for the job; empty if the user sets a comment, so that `find` goes by the script."""
        return "" if "comment" in run.cfg.cluster.sbatch_extra else super().new_tag(run)

    def send(self, run: CheckedRun, file: Path, tag: str) -> str:
        """Run sbatch, whose answer of a busy controller may be late or lost."""
        open_append(file.parent / LOGS / "job.log", PRIVATE).close()  # Slurm appends to it
        answer = _run_slurm(["sbatch", "--parsable", *([f"--comment={tag}"] if tag else []), str(file)])
        job = answer.output.partition(";")[0]
        if answer.status == 0 and job.isdecimal():
            return job
        reason = answer.errors or f"it exited with status {answer.status}"
        if answer.status < 0 or any(text in answer.errors for text in _LOST_ANSWERS):
            raise NoAnswer(f"cluster.kind=slurm: sbatch failed: {reason}; run the command again")
        with suppress(ConfigError):  # an error other than those above may be one of the answer, too
            if (accepted := self.find(file, tag)) is not None:
                run.notes.append(f"the submission failed, but Slurm had accepted the job: {reason}")
                return accepted
        raise ConfigError(refusal(answer.errors.splitlines(), run.cfg.cluster))

    def find(self, file: Path, tag: str) -> str | None:
        """Return the job with the comment `tag`; without a tag the unfinished one with this batch script."""
        states = ("-t", "all") if tag else ()
        answer = _run_slurm(["squeue", "-h", "--me", *states, "-o", "%A %k" if tag else "%A %o"])
        if answer.status:
            raise ConfigError(f"cluster.kind=slurm: squeue failed: {answer.errors}")
        listed = [line.partition(" ") for line in answer.output.splitlines()]
        jobs = [job for job, _, text in listed if text.strip() == (tag or str(file))]
        return max(jobs, key=int, default=None)

    def find_command(self, file: Path, tag: str) -> str:
        """Return a squeue command."""
        return f"squeue --me -o '%A %k' | grep {tag}" if tag else f"squeue --me -o '%A %o' | grep {file}"

    def owns(self, job: str) -> bool:
        """Return whether an id is a number, or a tag one of this scheduler."""
        return job.isdecimal() or not job or job.startswith(TAG)

    def query(self, jobs: Sequence[str]) -> dict[str, Job]:
        """Return the jobs, from squeue, scontrol and sacct."""
        return {job: _describe_job(job, state) for job, state in _job_states(jobs).items()}

    def cancel(self, job: str) -> bool:
        """Cancel a job with scancel."""
        return _run_slurm(["scancel", job]).status == 0

    def cancel_command(self, job: str) -> str:
        """Return the scancel command."""
        return f"scancel {job}"

    def summary(self, run: CheckedRun, job: str) -> list[tuple[str, str]]:
        """Return the commands to follow, stop and requeue the job."""
        logs = run.directory.path / LOGS
        followed = shlex.join([str(logs / "job.log"), str(logs / "latest" / "rank_0.log")])
        return [
            ("follow", f"tail -F {followed}"),
            ("stop", f"scancel {job}"),
            ("save, requeue", f"scancel --signal=USR2 {job}"),
        ]


def job_problems(cfg: RecipeConfig, *, query: bool = True) -> tuple[list[str], list[str]]:
    """Return the problems of submitting `cfg`, and notes: the estimated start, and paths that may be local; with
    cluster.dry_run=render, what was not checked.

    Args:
        cfg: The config.
        query: Whether to run `sbatch --test-only`, which is pointless if a key of `cluster` was rejected.
    """
    problems = setup_problems(cfg.cluster) + _script_problems(cfg.cluster) + _path_problems(cfg)
    if cfg.cluster.only_renders:
        return problems, _unchecked(cfg)
    problems += _cache_problems(cfg) + _build_problems(cfg.cluster)
    if not query:
        return problems, []
    try:
        rejections, estimate = _test_only(cfg.cluster)
    except ConfigError as error:
        return problems + error.problems, []
    return problems + rejections, [*estimate, *_local_paths(cfg)]


def _unchecked(cfg: RecipeConfig) -> list[str]:
    """Return what a submission checks on the cluster, one note each, with the keys and values."""
    cluster, container = cfg.cluster, cfg.cluster.container
    values = field_values(cluster)
    defaults = {"partition": "the default one", "account": "your default", "qos": "the account's", "time": "the limit"}
    asked = [f"{key}={values[key] or f'null ({what})'}" for key, what in defaults.items()]
    keys = ("constraint", "nodelist", "exclude", "reservation", "mem", "cpus_per_proc")
    asked += [f"{key}={values[key]}" for key in keys if values[key] is not None]
    asked += [f"sbatch_extra.{name}={value}" for name, value in cluster.sbatch_extra.items()]
    in_container = container.runtime != ContainerRuntime.none
    python = cluster.python or ("python" if in_container else sys.executable)
    image = f" in the image {container.image} ({container.runtime})" if in_container else ""
    folders = [Path(os.path.expanduser(cfg.run.dir or "")), Path(), *_shared_paths(cfg).values()]
    paths = dict.fromkeys(str(path.absolute()) for path in folders)
    offline = {**os.environ, **cluster.network_env, **cluster.env}
    return [
        f"not checked: cluster.{', '.join(asked)}: whether Slurm accepts them, and their limits (sbatch --test-only)",
        f"not checked: cluster.nodes={cluster.nodes}, procs_per_node={cluster.procs_per_node}, "
        f"device={cluster.device}, gpu_request={cluster.gpu_request}: whether there are such nodes",
        f"not checked: python={python}{image}: whether it starts on the nodes, with Meshbook's packages and a build of "
        "torch for their devices",
        f"not checked: {', '.join(paths)}: whether the nodes have access",
        *(["not checked: HF_HUB_OFFLINE: whether the nodes' cache has the model"] if is_offline(offline) else []),
    ]


def _test_only(cluster: ClusterConfig) -> tuple[list[str], list[str]]:
    """Run sbatch --test-only with the options of the job; return its objections, and its estimate of the start."""
    arguments = [as_argument(option) for option in resource_options(cluster)]
    answer = _run_slurm(["sbatch", "--test-only", *arguments], script="#!/bin/sh\n")
    lines = [line for line in answer.errors.splitlines() if line.strip()]
    if answer.status == 0:
        starts = [line.removeprefix("sbatch: ") for line in lines if " to start at " in line]
        return [], [re.sub(r"^Job \d+ to start", "could start", line) for line in starts]
    return [refusal(lines, cluster)], []


def refusal(lines: list[str], cluster: ClusterConfig) -> str:
    """Return the error output of sbatch as one sentence, with the keys to change.

    If Slurm cannot be reached, quote only the first line that reports that.
    """
    reasons = []
    for line in lines:
        text = line
        while (shorter := _REASON.sub("", text)) != text:
            text = shorter
        reasons.append(text)
    unreachable = next((reason for reason in reasons if any(text in reason for text in _UNREACHABLE)), None)
    if unreachable is not None:
        advice = f"submit from a login node of the cluster, {_WITHOUT_CLUSTER}"
        why = unreachable.partition(", retrying")[0]
        return f"cluster.kind=slurm: Slurm cannot be reached from here: {why}; {advice}"
    why = "; ".join(dict.fromkeys(reasons)) or "no reason given"
    requested = " ".join(as_argument(option) for option in resource_options(cluster))
    return f"cluster.kind=slurm: sbatch rejects {requested}: {why}; change these keys of cluster (see sinfo)"


def _script_problems(cluster: ClusterConfig) -> list[str]:
    if cluster.template is not None and not Path(os.path.expanduser(cluster.template)).is_file():
        return [f"cluster.template={cluster.template}: no such file"]
    python = cluster.python
    if python and "/" in python and cluster.container.runtime == ContainerRuntime.none and not cluster.only_renders:
        return [] if os.access(python, os.X_OK) else [f"cluster.python={python}: is not an executable file"]
    return []


def _build_problems(cluster: ClusterConfig) -> list[str]:
    """Reject GPU jobs with a CPU build of torch, if the job uses the Python that submits it."""
    # Of values, only those of generic resources count: a partition for CPU jobs may be called gpu-test.
    requests_gpus = any(
        "gpu" in name or ("gpu" in value and name.startswith(("gres", "tres")))
        for name, value in resource_options(cluster)
    )
    version = _torch_built_for_cpus() if requests_gpus and cluster.has_same_packages else None
    if version is None:
        return []
    return [
        f"cluster.device={cluster.device}: the job requests GPUs, but torch {version} in {sys.prefix} was built for "
        "CPUs; install a CUDA build (make install TORCH=cuda), set another cluster.python, or set cluster.device=cpu"
    ]


def _torch_built_for_cpus(version_file: Path | None = None) -> str | None:
    """Return torch's version if it was built for CPUs only, else None, without importing torch.

    Args:
        version_file: torch/version.py, which torch's build generates; None for that of the installed torch.
    """
    if version_file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        version_file = Path(spec.origin).with_name("version.py")
    text = version_file.read_text() if version_file.is_file() else ""
    values = dict(re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *(.*)$", text, re.MULTILINE))
    if "cuda" not in values or any(values.get(name, "None") != "None" for name in ("cuda", "hip", "xpu")):
        return None
    return values.get("__version__", "").strip("'\"")


def _path_problems(cfg: RecipeConfig) -> list[str]:
    """Reject paths with characters special to Slurm (% and \\ in log paths), PYTHONPATH (:) or container mounts (,)."""
    in_container = cfg.cluster.container.runtime != ContainerRuntime.none
    special = "%\\:," if in_container else "%\\:"
    problems = []
    for key, path in (("run.dir", cfg.run.dir or ""), ("the working directory", str(Path.cwd()))):
        bad = sorted({character for character in path if character in special or not character.isprintable()})
        if bad:
            listed = " ".join(map(repr, bad))
            problems.append(f"{key}={path!r}: holds {listed}, which Slurm would interpret; choose another path")
    return problems


def _cache_problems(cfg: RecipeConfig) -> list[str]:
    """Check that the model and tokenizer are cached if the nodes run with HF_HUB_OFFLINE."""
    environ = {**os.environ, **cfg.cluster.network_env, **cfg.cluster.env}
    if not is_offline(environ):
        return []
    cache = hub_cache(environ)
    return [
        f"{key}={name}: is not in the hub's cache {cache}, and the nodes use only that (HF_HUB_OFFLINE); download it "
        f"first: hf download {name}"
        for key, name in named_models(cfg).items()
        if _is_missing(name, key, cache)
    ]


def _is_missing(name: str, key: str, cache: Path) -> bool:
    try:
        files = locate(name, key)
    except ConfigError:
        return False  # problems of the name are reported by other checks
    folder = cache / ("models--" + files.name_or_folder.replace("/", "--")) / "snapshots"
    return not files.is_local and not any(folder.glob("*/*config.json"))


def _shared_paths(cfg: RecipeConfig) -> dict[str, Path]:
    """Return the paths that the nodes need, by key; not names of models on the hub."""
    in_container = cfg.cluster.container.runtime != ContainerRuntime.none
    named = {
        **named_paths(cfg),
        "code": None if cfg.cluster.snapshot else str(ROOT),
        "python": None if in_container else cfg.cluster.python or sys.prefix,
    }
    paths = {key: Path(os.path.expanduser(name)) for key, name in named.items() if name}
    return {key: path for key, path in paths.items() if path.is_absolute() or path.exists()}


def _local_paths(cfg: RecipeConfig) -> list[str]:
    """Return a note on paths that the nodes may not be able to access."""
    local = [
        f"{key} ({kind})"
        for key, path in _shared_paths(cfg).items()
        if (kind := file_system(path)) in LOCAL_FILE_SYSTEMS
    ]
    if not local:
        return []
    return [f"the nodes need access to {', '.join(local)}, but these file systems look local to this machine"]


def _job_states(jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of each job, such as RUNNING, or `_GONE` or `_UNKNOWN`.

    Query squeue once for all jobs; then scontrol and sacct for each job that squeue no longer lists. Each command may
    be missing or fail. If the controller is down, skip scontrol, since every call would wait for its timeout.
    """
    slurm_ids = [job for job in jobs if job.isdecimal()]
    listed = _answer("squeue", "-h", "-t", "all", "-j", ",".join(slurm_ids), "-o", "%A %T") if slurm_ids else None
    states = dict(line.split()[:2] for line in (listed or "").splitlines() if len(line.split()) > 1)
    unlisted = [job for job in slurm_ids if job not in states]
    is_up = " is UP" in (_answer("scontrol", "ping") or "") if unlisted else False
    return states | {job: _unlisted_state(job, is_up) for job in unlisted}


def _to_job_state(state: str) -> str:
    """Return the `JobState` value of a Slurm state."""
    if state in (_GONE, _UNKNOWN):
        return state
    if state in _SUBMITTED:
        return "submitted"
    return "running" if state in RUNNING else _ENDED.get(state, "failed")


def _describe_job(job: str, state: str) -> Job:
    """Return a job as a `Job`, from its Slurm state."""
    doubt = "there is no squeue on PATH, or Slurm does not respond" if state == _UNKNOWN else ""
    return Job(job, "Slurm", JobState(_to_job_state(state)), state, over=state == _GONE or state in _ENDED, doubt=doubt)


def _unlisted_state(job: str, is_up: bool) -> str:
    """Return the state of a job that squeue does not list, from scontrol if the controller is up, else from sacct."""
    shown = _result("scontrol", "-o", "show", "job", job) if is_up else None
    if shown and (found := re.search(r"\bJobState=(\w+)", shown.output)):
        return found[1]
    kept = _answer("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")  # -P: states are not cut to the column's width
    if kept:
        return kept.splitlines()[-1].split()[0].rstrip("+")  # CANCELLED by 1000
    # A slow controller responds to ping, but not to queries: only its own word that it lists no such job is proof.
    return _GONE if shown and "Invalid job id" in shown.errors else _UNKNOWN


def _answer(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails or times out."""
    result = _result(*command)
    return result.output if result and result.status == 0 else None


def _result(*command: str) -> CommandResult | None:
    """Return the result of a command; None if it is missing or times out."""
    try:
        return _run_slurm(command)
    except (ConfigError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status, stdout and stderr of a command."""

    status: int
    output: str
    errors: str


def _clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a surrounding job or step, which a job submitted from it would inherit."""
    return {
        name: value
        for name, value in without_ranks(environ).items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }


def _run_slurm(command: Sequence[str], script: str = "") -> CommandResult:
    """Run a Slurm command with `script` as its stdin.

    Raises ConfigError if the command is not installed or SLURM_CONF is not a file (Slurm would retry for a minute), and
    NoAnswer if the controller does not respond in time.
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
            timeout=_TIMEOUT,
            env=_clean_environment(os.environ),
            restore_signals=False,  # a busy controller closes connections: SIGPIPE must not kill
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:  # the latter if a folder in PATH is not searchable
        raise ConfigError(
            f"cluster.kind=slurm: there is no {command[0]} on PATH; submit from a login node of the cluster, "
            f"{_WITHOUT_CLUSTER}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(
            f"cluster.kind=slurm: {command[0]} did not respond within {_TIMEOUT:g} s; check the controller with sinfo"
        ) from error
    return CommandResult(done.returncode, done.stdout.strip(), done.stderr.strip())
