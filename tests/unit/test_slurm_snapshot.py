"""The copy of the code: what git knows of it, or what looks like code where there is no git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from components.config.errors import ConfigError
from components.launch.slurm import snapshot
from components.launch.slurm.snapshot import PROJECT, copied_recipe_path, copy_code


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")


def copied(target: Path) -> set[str]:
    return {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project in place of this one."""
    folder = tmp_path / "the project"
    write(folder, "recipes/mine.py", "components/a.py", "conf/finetune.yaml", "tests/test_a.py", "outputs/run/log.txt")
    write(
        folder, "data.bin", "notes.md", ".hidden/x.py", "venv/pyvenv.cfg", "venv/lib.py", "components/__pycache__/a.py"
    )
    monkeypatch.setattr(snapshot, "PROJECT", folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_folder_without_git_gives_code_and_text(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    number = copy_code(project / "recipes" / "mine.py", target)
    assert copied(target) == {"recipes/mine.py", "components/a.py", "conf/finetune.yaml", "notes.md"}
    assert number == 4
    assert (target / "components" / "a.py").read_text() == "this is components/a.py"


def test_a_repository_gives_what_is_tracked_or_new_as_it_is_now(project: Path, tmp_path: Path) -> None:
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
    assert copied(target) == {
        *("recipes/mine.py", "components/a.py", "components/new.py", "conf/finetune.yaml", "notes.md"),
        *("ünï code.py", "weights.bin"),
    }
    assert (target / "components" / "a.py").read_text() == "edited"


def test_a_recipe_that_git_ignores_is_copied_all_the_same(project: Path, tmp_path: Path) -> None:
    (project / ".gitignore").write_text("recipes/mine.py\n")
    git(project, "init", "-q")
    copy_code(project / "recipes" / "mine.py", tmp_path / "copy")
    assert (tmp_path / "copy" / "recipes" / "mine.py").exists()


def test_a_recipe_elsewhere_comes_with_its_neighbours_and_packages(project: Path, tmp_path: Path) -> None:
    """Not with everything below its folder, which may be a home directory."""
    home = tmp_path / "home"
    write(home, "mine.py", "helper.py", "data.csv", "package/__init__.py", "package/part.py", "other/thing.py")
    target = tmp_path / "copy"
    copy_code(home / "mine.py", target)
    place = copied_recipe_path(home / "mine.py", target)
    assert place == target / "recipe" / "mine.py"
    assert copied(place.parent) == {"mine.py", "helper.py", "package/__init__.py", "package/part.py"}
    assert (target / "components" / "a.py").exists()


def test_what_is_too_much_for_code_is_refused_before_it_is_copied(project: Path, tmp_path: Path) -> None:
    write(project, "huge.py")
    with (project / "huge.py").open("r+b") as file:
        file.truncate(snapshot.LARGEST + 1)  # takes no room on a disk
    with pytest.raises(ConfigError, match=f"the code at {project} .* is 64 MiB, more than 64; add files that are not"):
        copy_code(project / "recipes" / "mine.py", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_this_project_fits(tmp_path: Path) -> None:
    recipe = PROJECT / "recipes" / "finetune.py"
    assert copied_recipe_path(recipe, tmp_path / "copy") == tmp_path / "copy" / "recipes" / "finetune.py"
    assert 100 < copy_code(recipe, tmp_path / "copy") < 1000
    kept = copied(tmp_path / "copy")
    assert {"conf/finetune.yaml", "slurm/train.sbatch.j2", "components/launch/slurm/conclude.py"} <= kept
    assert not [name for name in kept if name.startswith("tests/")]
