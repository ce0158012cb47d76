"""`make install` and `make install-dev`: what they pick and print; lazy packages import when a name is first used."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.launch.slurm.submit import _torch_built_for_cpus

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("bash", "dirname", "uname", "env", "tail")
FAKE_PYTHON = (
    '#!/bin/sh\ncase "$*" in *urlopen*) exit {reachable};; *failing*) exit 1;; esac\n'
    'case "$*" in *version.py*) echo 2.13.0 for CPUs; exit;; esac\n'
    'echo "$0 $*" >> {log}\ncase "$*" in *install*) echo Collecting numpy; echo WARNING: of pip >&2;; esac\n'
)
"""Interpreter that accepts and logs every command but those with `failing`, and prints as pip does."""


class Machine:
    """A PATH with only the given programs, and a virtual environment whose Python logs its commands."""

    def __init__(self, folder: Path, *, reachable: bool = True) -> None:
        self.folder, self.log, self.path = folder, folder / "log", folder / "bin"
        self.python = FAKE_PYTHON.format(reachable=0 if reachable else 1, log=self.log)
        self.path.mkdir()
        for name in PROGRAMS:
            (self.path / name).symlink_to(str(shutil.which(name)))
        self.add("python", self.python, folder / "venv" / "bin")

    def add(self, name: str, text: str = "#!/bin/sh\n", folder: Path | None = None) -> None:
        program = (folder or self.path) / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.path), "VENV": str(self.folder / "venv"), **variables}
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "install.sh")], env=environment, capture_output=True, text=True, check=False
        )


@pytest.mark.parametrize(
    ("program", "setting", "build"),
    [(None, "auto", "CPUs"), ("nvidia-smi", "auto", "GPUs"), ("sbatch", "auto", "GPUs"), ("sbatch", "cpu", "CPUs")],
)
def test_torch_build_defaults_to_cpu_without_nvidia_smi_or_sbatch(
    tmp_path: Path, program: str | None, setting: str, build: str
) -> None:
    machine = Machine(tmp_path)
    machine.add("python3.11")
    if program:
        machine.add(program)
    result = machine.install(TORCH=setting)
    assert result.returncode == 0, result.stderr
    assert f"torch for {build}" in result.stdout.splitlines()[0]
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in machine.log.read_text()) is (build == "CPUs")


def test_unreachable_wheel_index_is_reported_and_not_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path, reachable=False)
    machine.add("python3.11")
    result = machine.install()
    assert result.returncode == 0, result.stderr
    assert "cannot be reached: torch comes from the configured index" in result.stdout
    assert "--extra-index-url" not in machine.log.read_text()


@pytest.mark.parametrize(
    ("installer", "extras"), [("pip", "plot"), ("pip", "plot,dev"), ("uv", "plot"), ("uv", "plot,dev")]
)
def test_a_run_gets_its_packages_and_a_developer_those_of_tests(tmp_path: Path, installer: str, extras: str) -> None:
    """Each phase prints one line; the output of pip is in a file."""
    machine = Machine(tmp_path)
    machine.add("python3.11")
    machine.add("uv", machine.python, tmp_path / "venv" / "bin")
    result = machine.install(INSTALLER=installer, EXTRAS=extras)
    assert (result.returncode, result.stderr) == (0, "")
    commands = machine.log.read_text().splitlines()
    (command,) = (line for line in commands if ".[" in line)
    assert command.endswith(f".[{extras}]")
    assert command.startswith(f"{tmp_path}/venv/bin/uv pip install") is (installer == "uv")
    assert any("torchao" in line or "megatron" in line for line in commands) is ("dev" in extras)
    assert [line[:4] for line in result.stdout.splitlines()] == ["Inst", "1/4 ", "2/4 ", "3/4 ", "4/4 ", "Inst"]
    assert "WARNING: of pip" in (tmp_path / "venv" / "install.log").read_text()


def test_failure_of_pip_ends_with_its_output_and_the_file(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("python3.11")
    result = machine.install(EXTRAS="failing")
    assert result.returncode == 2
    *output, last = result.stderr.splitlines()
    assert "Collecting numpy" in output
    assert last.startswith("make install: '")
    assert last.endswith(f".[failing]' failed; all of its output is in {tmp_path}/venv/install.log")


@pytest.mark.parametrize(
    ("changed", "installed"), [(None, ""), ("pyproject.toml", "plot plot,dev"), ("constraints.txt", "plot plot,dev")]
)
def test_a_change_of_the_packages_is_installed_again(tmp_path: Path, changed: str | None, installed: str) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "install.sh"
    script.write_text(f'#!/bin/sh\necho "$EXTRAS" >> {tmp_path}/log\nmkdir -p "$VENV"\n')
    script.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "setup.py", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    os.utime(script, (1, 1))

    def make() -> str:
        for target in ("install", "install-dev", "install"):
            subprocess.run(["make", target, "VENV=.venv"], cwd=tmp_path, capture_output=True, check=True)
        text = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
        (tmp_path / "log").unlink(missing_ok=True)
        return " ".join(text.split())

    assert make() == "plot plot,dev"
    if changed:
        for stamp in tmp_path.glob(".venv/.meshbook-*"):
            os.utime(stamp, (2, 2))
        os.utime(tmp_path / changed, (3, 3))
    assert make() == installed


def test_unknown_installer_is_rejected(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("python3.11")
    result = machine.install(INSTALLER="conda")
    assert (result.returncode, result.stderr) == (2, "make install: INSTALLER=conda: must be pip or uv\n")


def test_broken_python_is_skipped(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("python3.11", "#!/bin/sh\necho 'pyenv: command not found' >&2; exit 127\n")
    machine.add("python3.13", machine.python)
    result = machine.install(VENV=str(tmp_path / "new"))
    assert f"{machine.path}/python3.13 -m venv {tmp_path}/new" in machine.log.read_text(), result.stderr


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "no Python 3.11, 3.12 or 3.13 with venv on PATH; install one"),
        ({"PYTHON": "python2"}, "PYTHON=python2: must be a Python 3.11, 3.12 or 3.13"),
        ({"TORCH": "rocm", "PYTHON": sys.executable}, "TORCH=rocm: must be auto, cpu or cuda"),
    ],
)
def test_invalid_install_settings_are_rejected_in_one_line(
    tmp_path: Path, variables: dict[str, str], problem: str
) -> None:
    result = Machine(tmp_path).install(**variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert problem in result.stderr


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "2.13.0+cpu"),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", None),
        ("__version__ = '2.13.0+rocm7'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", None),
        ("", None),
    ],
)
def test_cpu_build_of_torch_is_detected_without_importing_it(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version.py").write_text(text)
    assert _torch_built_for_cpus(tmp_path / "version.py") == version


COMPONENTS = Path(__file__).resolve().parents[2] / "components"
LAZY = sorted(
    f"components.{init.parent.name}" for init in COMPONENTS.glob("*/__init__.py") if "lazy_names(" in init.read_text()
)
ALL = [*LAZY, "meshbook"]
PACKAGES = sorted(str(init.parent.relative_to(COMPONENTS.parent)) for init in COMPONENTS.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_of_a_package_lists_its_files_and_folders(package: str) -> None:
    """One line for each, which begins with its name."""
    folder = COMPONENTS.parent / package
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"^ *(\w+(?:\.py|/)) ", docstring, re.MULTILINE)
    files = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
    folders = [f"{init.parent.name}/" for init in folder.glob("*/__init__.py")]
    assert sorted(listed) == sorted(files + folders)


@pytest.mark.parametrize("name", ALL)
def test_no_public_name_equals_a_module_name(name: str) -> None:
    """Importing a module sets an attribute of its package, which would replace the public name."""
    package = importlib.import_module(name)
    folder = Path(str(package.__file__)).parent
    assert package.__all__
    assert {each.stem for each in folder.iterdir()}.isdisjoint(package.__all__)


def test_importing_components_does_not_import_torch() -> None:
    code = f"from components import {', '.join(name.rpartition('.')[2] for name in LAZY)}; import sys; " + (
        "assert not {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules), sorted(sys.modules)"
    )
    assert len(LAZY) == 6
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_every_lazy_name_can_be_imported() -> None:
    """Every public name, in a process that has imported nothing yet."""
    code = f"""
import importlib
for package in map(importlib.import_module, {ALL}):
    for name in package.__all__:
        getattr(package, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_lazy_package_lists_its_names_before_import() -> None:
    code = (
        "from components import models; assert 'build_on_meta' in models.__all__; assert dir(models) == models.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_name_raises_attribute_error() -> None:
    message = "module 'components.models' has no attribute 'bulid_on_meta'; did you mean build_on_meta?"
    with pytest.raises(AttributeError, match=re.escape(message)):
        _ = importlib.import_module("components.models").bulid_on_meta


def test_imports_pause_garbage_collections() -> None:
    """Nothing is collected while torch is imported, what it made is frozen, and later garbage is collected again."""
    code = """
import gc, weakref
from components import training
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
training.Run
assert collected.count("start") < 5, collected.count("start")  # otherwise about 700
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
frozen = gc.get_freeze_count()

class Node:
    pass

node = Node()
node.cycle, alive = node, weakref.ref(node)
training.prepare  # imports transformers; a model that exists by then must not be frozen
assert gc.get_freeze_count() <= frozen
del node
gc.collect()
assert alive() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
