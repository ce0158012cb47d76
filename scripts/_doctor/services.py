"""Checks of Slurm, the hub's cache, and Weights & Biases. Tokens are looked for and never printed."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from scripts._doctor.check import NOTE, OK, PROBLEM, ROOT, Check, ask, read_text, shorten, variable, why_not_writable
from scripts._doctor.machine import describe_place, file_system, is_networked

SHOWN = 6
"""Partitions that are listed."""
COLUMNS = "%P|%a|%l|%D|%t|%G"
"""Format of sinfo: partition, up or down, time limit, nodes, their state, GRES."""


def check_slurm() -> list[Check]:
    """Check whether jobs can be submitted from here, and to which partitions."""
    wanted = my_partition(read_text(ROOT / "conf" / "local" / "user.yaml"))
    conf = variable("SLURM_CONF")
    if conf and not os.path.isfile(conf):
        mend = "unset SLURM_CONF, or set it to the cluster's slurm.conf"
        return [Check("slurm", PROBLEM, f"SLURM_CONF={conf}: no such file", mend)]
    said = ask("sinfo", "--noheader", "-o", COLUMNS, seconds=10)
    if said.status is None and "not on PATH" in said.errors:
        if wanted:
            told = f"user.yaml asks for partition {wanted}, but there is no sinfo on PATH"
            return [
                Check("slurm", NOTE, f"{told}: runs go to this machine only", "module load slurm, or cluster=local")
            ]
        return [Check("slurm", NOTE, "none here (no sinfo on PATH): runs go to this machine only")]
    if said.status != 0:
        if not conf and not os.path.isfile("/etc/slurm/slurm.conf"):
            return [Check("slurm", NOTE, f"programs without a cluster: {said.complaint}", "export SLURM_CONF=...")]
        return [Check("slurm", PROBLEM, f"does not answer: {said.complaint}", "scontrol ping; cluster=local works")]
    partitions = read_partitions(said.output)
    checks = [Check("slurm", OK if up else NOTE, told) for _, up, told in partitions[:SHOWN]]
    if len(partitions) > SHOWN:
        checks.append(Check("slurm", OK, f"and {len(partitions) - SHOWN} more partitions: sinfo"))
    names = [name for name, _, _ in partitions]
    if not names:
        checks.append(Check("slurm", PROBLEM, "answers, but has no partition for you", "ask who runs the cluster"))
    elif wanted and wanted not in names:
        mend = f"cluster.partition={names[0]} in conf/local/user.yaml"
        checks.append(Check("slurm", PROBLEM, f"user.yaml asks for partition {wanted}, which does not exist", mend))
    return [*checks, *_shared_outputs()]


def read_partitions(text: str) -> list[tuple[str, bool, str]]:
    """Return name, whether it is up, and a description of every partition in sinfo's output."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 6:
            rows.setdefault(fields[0], []).append(fields)
    found = []
    for name, group in rows.items():
        is_up = group[0][1] == "up"
        nodes = sum(int(fields[3]) for fields in group if fields[3].isdigit())
        states = ", ".join(f"{fields[3]} {fields[4]}" for fields in group)
        gres = sorted({fields[5] for fields in group} - {"(null)", ""})
        told = f"partition {name} ({group[0][1]}): {nodes} nodes ({states}), time limit {group[0][2]}"
        found.append((name.rstrip("*"), is_up, f"{told}, {shorten(' '.join(gres), 40)}" if gres else told))
    return found


def my_partition(user_yaml: str) -> str:
    """Return cluster.partition of the user's own values, '' if it is not set. Needs no YAML package."""
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
    told = f"this folder is on {kind}, which the nodes may not see; they need the run directory"
    return [Check("slurm", NOTE, told, "start from a shared folder, or run.dir=/shared/...")]


def check_hub() -> list[Check]:
    """Check the cache of the Hugging Face hub. The default model and data need neither hub nor cache."""
    home = _hub_home()
    cache = Path(variable("HF_HUB_CACHE") or home / "hub")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE") if _is_on(name)]
    try:
        models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    except OSError:
        models = 0
    told = ", ".join(
        [
            describe_place(cache)[0],
            f"{models} models",
            "offline (" + ", ".join(offline) + ")" if offline else "online",
            "a token" if _has_token(home) else "no token",
        ]
    )
    if str(home).startswith("~"):
        return [Check("hub", NOTE, f"no home folder for {cache}", "export HF_HOME=/a/folder/of/yours")]
    reason = why_not_writable(cache)
    if reason and not offline:
        told = f"{told}; cannot be written ({reason}): models and data of the hub cannot be fetched"
        return [Check("hub", NOTE, told, "export HF_HOME=/a/folder/of/yours")]
    if offline and not models:
        return [Check("hub", NOTE, f"{told}: hub names cannot be used", f"unset {offline[0]}, or fill the cache first")]
    return [Check("hub", OK, told)]


def _hub_home() -> Path:
    asked = variable("HF_HOME")
    if asked:
        return Path(os.path.expanduser(os.path.expandvars(asked)))
    caches = variable("XDG_CACHE_HOME")
    return Path(caches or os.path.expanduser("~/.cache")) / "huggingface"


def _is_on(name: str) -> bool:
    return variable(name).upper() in {"1", "ON", "YES", "TRUE"}


def _has_token(home: Path) -> bool:
    file = Path(variable("HF_TOKEN_PATH") or home / "token")
    return bool(variable("HF_TOKEN") or variable("HUGGING_FACE_HUB_TOKEN") or read_text(file).strip())


def check_wandb() -> list[Check]:
    """Check whether logging.wandb.mode=online would find an account. It never stops a run."""
    mode = variable("WANDB_MODE")
    said = f"WANDB_MODE={mode}, " if mode else ""
    if importlib.util.find_spec("wandb") is None:
        return [Check("wandb", NOTE, f"{said}not installed; logging.wandb stays disabled", "pip install wandb")]
    if _is_logged_in():
        return [Check("wandb", OK, f"{said}installed, logged in; logging.wandb.mode=online records runs")]
    told = f"{said}installed, not logged in; logging.wandb.mode=offline works"
    return [Check("wandb", OK, told, "for online: wandb login")]


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
