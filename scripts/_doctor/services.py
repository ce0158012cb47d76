"""Checks of Slurm, the Hugging Face cache, and Weights & Biases. Access tokens are detected but never printed."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from scripts._doctor.check import (
    NOTE,
    OK,
    PROBLEM,
    ROOT,
    Check,
    read_text,
    run_command,
    shorten,
    variable,
    why_not_writable,
)
from scripts._doctor.machine import describe_disk, file_system, is_networked

LISTED = 6
"""Maximum number of partitions to list."""
COLUMNS = "%P|%a|%l|%D|%t|%G"
"""Output format of sinfo: partition, availability, time limit, nodes, their state, GRES."""


def check_slurm() -> list[Check]:
    """Check whether jobs can be submitted from this machine, and to which partitions."""
    configured = my_partition(read_text(ROOT / "conf" / "local" / "user.yaml"))
    conf = variable("SLURM_CONF")
    if conf and not os.path.isfile(conf):
        fix = "unset SLURM_CONF, or set it to the cluster's slurm.conf"
        return [Check("slurm", PROBLEM, f"SLURM_CONF={conf}: no such file", fix)]
    result = run_command("sinfo", "--noheader", "-o", COLUMNS, seconds=10)
    if result.status is None and "not on PATH" in result.errors:
        if configured:
            finding = f"user.yaml sets partition {configured}, but there is no sinfo on PATH"
            return [
                Check("slurm", NOTE, f"{finding}: only local runs are possible", "module load slurm, or cluster=local")
            ]
        return [Check("slurm", NOTE, "not installed (no sinfo on PATH): only local runs are possible")]
    if result.status != 0:
        if not conf and not os.path.isfile("/etc/slurm/slurm.conf"):
            return [
                Check(
                    "slurm",
                    NOTE,
                    f"installed, but no cluster is configured: {result.error_line}",
                    "export SLURM_CONF=...",
                )
            ]
        return [Check("slurm", PROBLEM, f"sinfo failed: {result.error_line}", "scontrol ping; cluster=local works")]
    partitions = read_partitions(result.output)
    checks = [Check("slurm", OK if up else NOTE, description) for _, up, description in partitions[:LISTED]]
    if len(partitions) > LISTED:
        checks.append(Check("slurm", OK, f"and {len(partitions) - LISTED} more partitions: see sinfo"))
    names = [name for name, _, _ in partitions]
    missing = ",".join(name for name in configured.split(",") if name not in names)  # sbatch accepts a list
    if not names:
        checks.append(Check("slurm", PROBLEM, "sinfo lists no partition for this user", "ask the administrators"))
    elif missing:
        fix = f"set cluster.partition={names[0]} in conf/local/user.yaml"
        checks.append(Check("slurm", PROBLEM, f"user.yaml sets partition {missing}, which does not exist", fix))
    return [*checks, *_shared_outputs()]


def read_partitions(text: str) -> list[tuple[str, bool, str]]:
    """Return (name, whether it is up, description) of every partition in sinfo's output."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 6:
            rows.setdefault(fields[0], []).append(fields)
    found = []
    for name, group in rows.items():
        is_up = group[0][1] == "up"
        nodes = sum(int(fields[3]) for fields in group if fields[3].isdecimal())
        states = ", ".join(f"{fields[3]} {fields[4]}" for fields in group)
        gres = sorted({fields[5] for fields in group} - {"(null)", ""})
        description = f"partition {name} ({group[0][1]}): {nodes} nodes ({states}), time limit {group[0][2]}"
        found.append(
            (name.rstrip("*"), is_up, f"{description}, {shorten(' '.join(gres), 40)}" if gres else description)
        )
    return found


def my_partition(user_yaml: str) -> str:
    """Return cluster.partition of the text of user.yaml, or '' if it is not set. Needs no YAML package."""
    section = re.search(r"^cluster:[ \t]*(?:#.*)?\n((?:[ \t]+.*\n?|[ \t]*\n|#.*\n)*)", user_yaml, re.MULTILINE)
    found = re.search(r"^[ \t]+partition:[ \t]*([^\s#]+)", section.group(1), re.MULTILINE) if section else None
    name = found.group(1).strip("\"'") if found else ""
    return "" if name in ("null", "~", "???") else name


def _shared_outputs() -> list[Check]:
    try:
        kind = file_system(Path.cwd())
    except OSError:
        return []
    if not kind or is_networked(kind):
        return []
    finding = f"this folder is on {kind}, which the nodes may not mount; they need access to the run directory"
    return [Check("slurm", NOTE, finding, "start from a shared folder, or set run.dir=/shared/...")]


def check_hub() -> list[Check]:
    """Check the Hugging Face Hub's cache. The default model and data need neither Hub nor cache."""
    home = _hub_home()
    cache = Path(variable("HF_HUB_CACHE") or home / "hub")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE") if _is_on(name)]
    try:
        models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    except OSError:
        models = 0
    finding = ", ".join(
        [
            describe_disk(cache)[0],
            f"{models} models",
            "offline (" + ", ".join(offline) + ")" if offline else "online",
            "a token" if _has_token(home) else "no token",
        ]
    )
    if str(home).startswith("~"):
        return [Check("hub", NOTE, f"no home folder for {cache}", "export HF_HOME=/path/to/folder")]
    reason = why_not_writable(cache)
    if reason and not offline:
        finding = f"{finding}; not writable ({reason}): models and datasets of the Hub cannot be downloaded"
        return [Check("hub", NOTE, finding, "export HF_HOME=/path/to/folder")]
    if offline and not models:
        return [
            Check("hub", NOTE, f"{finding}: Hub names cannot be used", f"unset {offline[0]}, or fill the cache first")
        ]
    return [Check("hub", OK, finding)]


def _hub_home() -> Path:
    configured = variable("HF_HOME")
    if configured:
        return Path(os.path.expanduser(os.path.expandvars(configured)))
    cache_home = variable("XDG_CACHE_HOME")
    return Path(cache_home or os.path.expanduser("~/.cache")) / "huggingface"


def _is_on(name: str) -> bool:
    return variable(name).upper() in {"1", "ON", "YES", "TRUE"}


def _has_token(home: Path) -> bool:
    file = Path(variable("HF_TOKEN_PATH") or home / "token")
    return bool(variable("HF_TOKEN") or variable("HUGGING_FACE_HUB_TOKEN") or read_text(file).strip())


def check_wandb() -> list[Check]:
    """Check whether logging.wandb.mode=online finds credentials. Missing ones never prevent a run."""
    mode = variable("WANDB_MODE")
    prefix = f"WANDB_MODE={mode}, " if mode else ""
    if importlib.util.find_spec("wandb") is None:
        return [
            Check(
                "wandb", NOTE, f"{prefix}not installed; logging.wandb stays disabled", "pip install 'meshbook[wandb]'"
            )
        ]
    if _is_logged_in():
        return [Check("wandb", OK, f"{prefix}installed, logged in; logging.wandb.mode=online records runs")]
    finding = f"{prefix}installed, not logged in; logging.wandb.mode=offline works"
    return [Check("wandb", OK, finding, "for online: wandb login")]


def _is_logged_in() -> bool:
    if variable("WANDB_API_KEY"):
        return True
    host = urlsplit(variable("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for file in (variable("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")):
        try:
            if file and host in netrc.netrc(file).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
