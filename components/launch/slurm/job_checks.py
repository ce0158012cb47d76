"""Checks of a job before it is submitted: of files and paths, and by asking sbatch."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from components.config.errors import ConfigError
from components.config.model_files import locate
from components.config.schema.cluster import ClusterConfig
from components.config.schema.data import MixtureDataConfig
from components.config.schema.recipes import RecipeConfig
from components.config.schema.slurm import ContainerRuntime
from components.launch.hub_access import hub_cache, is_offline
from components.launch.slurm.commands import ask
from components.launch.slurm.options import as_argument, resource_options
from components.launch.slurm.script import setup_problems
from components.launch.slurm.snapshot import PROJECT

LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "squashfs", "fuse.snapfuse"}
"""Kinds of file systems that other machines do not see, unless this one exports them."""

UNREACHABLE = (
    *("cannot stat file", "configuration source", "configuration file", "Unable to contact slurm controller"),
    "slurm_load",
)
"""In the output of sbatch when it cannot reach Slurm."""

_REASON = re.compile(r"^(sbatch|allocation failure|error|fatal|Batch job submission failed)[:\s]*", re.IGNORECASE)


def job_problems(cfg: RecipeConfig, *, ask_slurm: bool = True) -> tuple[list[str], list[str]]:
    """Return the problems of submitting `cfg`, and notes: when it could start, and which paths may be local.

    Args:
        cfg: The config.
        ask_slurm: Whether to run `sbatch --test-only`, which is pointless if a key of `cluster` was rejected.
    """
    problems = setup_problems(cfg.cluster) + _script_problems(cfg.cluster) + _cache_problems(cfg)
    problems += _build_problems(cfg.cluster)
    problems += _path_problems(cfg)
    if not ask_slurm:
        return problems, []
    try:
        refused, estimate = _test_only(cfg.cluster)
    except ConfigError as error:
        return problems + error.problems, []
    return problems + refused, [*estimate, *_local_paths(cfg)]


def _test_only(cluster: ClusterConfig) -> tuple[list[str], list[str]]:
    """Ask Slurm whether it would take such a job: what it objects to, and when it could start."""
    arguments = [as_argument(option) for option in resource_options(cluster)]
    answer = ask(["sbatch", "--test-only", *arguments], script="#!/bin/sh\n")
    lines = [line for line in answer.errors.splitlines() if line.strip()]
    if answer.status == 0:
        starts = [line.removeprefix("sbatch: ") for line in lines if " to start at " in line]
        return [], [re.sub(r"^Job \d+ to start", "could start", line) for line in starts]
    return [refusal(lines, cluster)], []


def refusal(lines: list[str], cluster: ClusterConfig) -> str:
    """Return the output of sbatch as one sentence, with the keys to change.

    If Slurm cannot be reached, only the first line that reports it: the others are about the search.
    """
    reasons = []
    for line in lines:
        text = line
        while (shorter := _REASON.sub("", text)) != text:
            text = shorter
        reasons.append(text)
    unreachable = next((reason for reason in reasons if any(sign in reason for sign in UNREACHABLE)), None)
    if unreachable is not None:
        advice = "submit from a login node of the cluster, or set cluster=local"
        why = unreachable.partition(", retrying")[0]
        return f"cluster.kind=slurm: Slurm cannot be reached from here: {why}; {advice}"
    why = "; ".join(dict.fromkeys(reasons)) or "no reason given"
    wanted = " ".join(as_argument(option) for option in resource_options(cluster))
    return f"cluster.kind=slurm: sbatch refuses {wanted}: {why}; change these keys of cluster (see sinfo)"


def _script_problems(cluster: ClusterConfig) -> list[str]:
    if cluster.template is not None and not Path(os.path.expanduser(cluster.template)).is_file():
        return [f"cluster.template={cluster.template}: no such file"]
    python = cluster.python
    if python is not None and "/" in python and cluster.container.runtime == ContainerRuntime.none:
        return [] if os.access(python, os.X_OK) else [f"cluster.python={python}: is no program that can run here"]
    return []


def _build_problems(cluster: ClusterConfig) -> list[str]:
    """A job on GPUs cannot use torch built for CPUs. Checked where the job runs on the Python that submits it."""
    asks_for_gpus = any("gpu" in option for pair in resource_options(cluster) for option in pair)
    own_python = cluster.python is None and cluster.container.runtime == ContainerRuntime.none
    version = torch_built_for_cpus() if asks_for_gpus and own_python else None
    if version is None:
        return []
    return [
        f"cluster.device={cluster.device}: the job asks for GPUs, but torch {version} in {sys.prefix} was built for "
        "CPUs; install a CUDA build (make install TORCH=cuda), name another cluster.python, or set cluster.device=cpu"
    ]


def torch_built_for_cpus(version_file: Path | None = None) -> str | None:
    """Return torch's version where it was built for CPUs only, else None; torch is not imported.

    version_file: torch/version.py, which torch's build writes; None: that of the installed torch.
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
    """Slurm replaces % in the path of a log and takes a backslash for its own; PYTHONPATH and mounts are lists."""
    in_container = cfg.cluster.container.runtime != ContainerRuntime.none
    special = "%\\:," if in_container else "%\\:"
    problems = []
    for key, path in (("run.dir", cfg.run.dir or ""), ("the folder of this command", str(Path.cwd()))):
        bad = sorted({character for character in path if character in special or not character.isprintable()})
        if bad:
            held = " ".join(map(repr, bad))
            problems.append(f"{key}={path!r}: holds {held}, which means something else to Slurm; choose another path")
    return problems


def _cache_problems(cfg: RecipeConfig) -> list[str]:
    """Check that what comes from the hub is cached, if the nodes may only use the cache."""
    environ = {**os.environ, **cfg.cluster.network_env, **cfg.cluster.env}
    if not is_offline(environ):
        return []
    wanted = {"model.tokenizer": cfg.model.tokenizer, "model.path": cfg.model.path}
    cache = hub_cache(environ)
    return [
        f"{key}={name}: is not in the hub's cache {cache}, and the nodes have no hub (HF_HUB_OFFLINE); download it "
        f"first: hf download {name}"
        for key, name in wanted.items()
        if name not in (None, "bytes") and _is_missing(name, key, cache)
    ]


def _is_missing(name: str, key: str, cache: Path) -> bool:
    try:
        files = locate(name, key)
    except ConfigError:
        return False  # reported elsewhere
    folder = cache / ("models--" + files.name_or_folder.replace("/", "--")) / "snapshots"
    return not files.is_local and not any(folder.glob("*/config.json"))


def _local_paths(cfg: RecipeConfig) -> list[str]:
    """A note of the paths that the nodes may not see."""
    mounts = _mounts()
    in_container = cfg.cluster.container.runtime != ContainerRuntime.none
    sources = cfg.data.sources if isinstance(cfg.data, MixtureDataConfig) else {}
    named = {
        "run.dir": cfg.run.dir or str(Path.cwd()),
        "model.path": cfg.model.path,
        "data.path": getattr(cfg.data, "path", None),
        **{f"data.sources.{name}.path": getattr(each, "path", None) for name, each in sources.items()},
        "code": None if cfg.cluster.snapshot else str(PROJECT),
        "python": None if in_container else cfg.cluster.python or sys.prefix,
    }
    paths = {key: Path(os.path.expanduser(name)) for key, name in named.items() if name}
    local = [
        f"{key} ({kind})"
        for key, path in paths.items()
        if (path.is_absolute() or path.exists()) and (kind := _file_system(path, mounts)) in LOCAL_FILE_SYSTEMS
    ]
    if not local:
        return []
    return [f"the nodes must see {', '.join(local)}: on this machine these are file systems of its own"]


def _mounts() -> dict[str, str]:
    table = Path("/proc/self/mounts")
    lines = table.read_text().splitlines() if table.exists() else []
    return {words[1].replace("\\040", " "): words[2] for words in map(str.split, lines) if len(words) > 2}


def _file_system(path: Path, mounts: Mapping[str, str]) -> str | None:
    place = path.absolute()
    return next((mounts[str(folder)] for folder in (place, *place.parents) if str(folder) in mounts), None)
