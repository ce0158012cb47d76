"""The code snapshot: tracked and new files in a git repository, otherwise files that look like code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from components.launch.job import scheduler
from components.launch.job.scheduler import PROJECT, _copied_recipe_path, copy_code
from components.protocol.errors import ConfigError

PLAIN = {"recipes/mine.py", "components/a.py", "conf/finetune.yaml", "notes.md"}
"""Files of the small project that a snapshot has."""


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")


def copied(target: Path) -> set[str]:
    return {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a small project and patch it in as the project to copy."""
    folder = tmp_path / "the project"
    write(folder, "recipes/mine.py", "components/a.py", "conf/finetune.yaml", "tests/test_a.py", "outputs/run/log.txt")
    write(
        folder, "data.bin", "notes.md", ".hidden/x.py", "venv/pyvenv.cfg", "venv/lib.py", "components/__pycache__/a.py"
    )
    monkeypatch.setattr(scheduler, "ROOT", folder)
    monkeypatch.setattr(scheduler, "PROJECT", folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_project_without_git_copies_code_and_text_files(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    number = copy_code(project / "recipes" / "mine.py", target)
    assert copied(target) == PLAIN
    assert number == 4
    assert (target / "components" / "a.py").read_text() == "this is components/a.py"


def test_second_snapshot_has_no_files_of_the_first(project: Path, tmp_path: Path) -> None:
    """Python would import a package of the first snapshot instead of a module of this name."""
    write(project, "components/part/__init__.py")
    target = tmp_path / "copy"
    copy_code(project / "recipes" / "mine.py", target)
    shutil.rmtree(project / "components" / "part")
    write(project, "components/part.py")
    copy_code(project / "recipes" / "mine.py", target)
    assert copied(target) == {*PLAIN, "components/part.py"}
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("copy")] == ["copy"]


def test_git_project_copies_tracked_and_untracked_files_as_on_disk(project: Path, tmp_path: Path) -> None:
    write(project, ".gitignore", "gone.py", "ünï code.py")
    (project / ".gitignore").write_text("data.bin\nvenv/\n.hidden/\n__pycache__/\n")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "all")
    (project / "gone.py").unlink()
    (project / "components" / "a.py").write_text("edited")
    write(project, "components/new.py", "weights.bin", ".env")
    target = tmp_path / "copy"
    copy_code(project / "recipes" / "mine.py", target)
    assert copied(target) == {*PLAIN, "components/new.py", "ünï code.py", "weights.bin"}
    assert (target / "components" / "a.py").read_text() == "edited"


def test_recipe_ignored_by_git_is_copied(project: Path, tmp_path: Path) -> None:
    (project / ".gitignore").write_text("recipes/mine.py\n")
    git(project, "init", "-q")
    copy_code(project / "recipes" / "mine.py", tmp_path / "copy")
    assert (tmp_path / "copy" / "recipes" / "mine.py").exists()


def test_external_recipe_is_copied_with_sibling_modules_and_packages(project: Path, tmp_path: Path) -> None:
    """Other subfolders are not copied: the recipe's folder may be a home directory."""
    home = tmp_path / "home"
    write(home, "mine.py", "helper.py", "data.csv", "package/__init__.py", "package/part.py", "other/thing.py")
    target = tmp_path / "copy"
    copy_code(home / "mine.py", target)
    recipe = _copied_recipe_path(home / "mine.py", target)
    assert recipe == target / "recipe" / "mine.py"
    assert copied(recipe.parent) == {"mine.py", "helper.py", "package/__init__.py", "package/part.py"}
    assert (target / "components" / "a.py").exists()


@pytest.mark.parametrize("tracked", ["", "work/notes.md"])
def test_recipe_whose_folder_an_outer_repository_ignores_is_copied_with_its_modules(
    project: Path, tmp_path: Path, tracked: str
) -> None:
    """A home directory may be a repository of dotfiles that ignores everything else."""
    home = tmp_path / "home"
    write(home, "work/mine.py", "work/helper.py", "work/package/__init__.py", "work/notes.md")
    (home / ".gitignore").write_text("*\n")
    git(home, "init", "-q")
    git(home, "add", "-f", ".gitignore", *filter(None, [tracked]))
    copy_code(home / "work" / "mine.py", tmp_path / "copy")
    assert copied(tmp_path / "copy" / "recipe") == {"mine.py", "helper.py", "package/__init__.py", "notes.md"}


def test_project_that_an_outer_repository_ignores_is_copied(project: Path, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    git(tmp_path, "init", "-q")
    copy_code(project / "recipes" / "mine.py", tmp_path / "copy")
    assert copied(tmp_path / "copy") == PLAIN


def test_oversized_code_is_rejected_before_copying(project: Path, tmp_path: Path) -> None:
    write(project, "huge.py")
    with (project / "huge.py").open("r+b") as file:
        file.truncate(scheduler._LARGEST_COPY + 1)  # sparse file, uses no disk space
    with pytest.raises(ConfigError, match=f"the code at {project} .* is 64 MiB, more than 64; add files that are not"):
        copy_code(project / "recipes" / "mine.py", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_snapshot_of_this_project_is_within_the_limits(tmp_path: Path) -> None:
    recipe = PROJECT / "recipes" / "finetune.py"
    assert _copied_recipe_path(recipe, tmp_path / "copy") == tmp_path / "copy" / "recipes" / "finetune.py"
    assert 100 < copy_code(recipe, tmp_path / "copy") < 1000
    files = copied(tmp_path / "copy")
    assert {"conf/finetune.yaml", "slurm/train.sbatch.j2", "components/launch/slurm/script.py"} <= files
    assert not [name for name in files if name.startswith("tests/")]


def test_snapshot_without_git_has_the_same_code_of_this_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an unpacked archive or an image; chat templates among it."""
    recipe, folders = PROJECT / "recipes" / "finetune.py", ("components", "conf", "recipes", "scripts", "slurm")
    copy_code(recipe, tmp_path / "git")
    monkeypatch.setenv("PATH", str(tmp_path))
    copy_code(recipe, tmp_path / "plain")
    of_git, plain = (
        {name for name in copied(tmp_path / copy) if name.partition("/")[0] in folders} for copy in ("git", "plain")
    )
    assert "components/models/chat_templates/chatml.jinja" in plain
    assert {name for name in of_git if not name.endswith((".example", ".csv"))} <= plain
