"""AGENTS.md: its commands run, its limits are those that are checked, and the names in code font exist.

Recipes are composed and validated, but not run (`--cfg job`); pytest only collects, and make only prints (`make -n`).
test_documentation.py checks its paths, keys, options and targets, like those of a page of docs/.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.dev import check_sizes
from tests.config.commands import REPOSITORY

TEXT = (REPOSITORY / "AGENTS.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
LIMITS = {
    r"(\d+) lines in a recipe": check_sizes.RECIPE_LINES,
    r"or (\d+) in a file": check_sizes.FILE_LINES,
    r"(\d+) lines or \d+ arguments in a function": check_sizes.FUNCTION_LINES,
    r"(\d+) arguments in a function": check_sizes.ARGUMENTS,
    r"(\d+) levels of nesting": check_sizes.NESTING,
    r"(\d+) files in a folder": check_sizes.FOLDER_FILES,
}
FORBIDDEN = {"Exception"}
"""Names in code font that the page rules out."""


def short_form(words: list[str]) -> list[str]:
    """Return a command that shows within seconds whether the one on the page would start."""
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    if words[1:3] == ["-m", "pytest"]:
        return [*words, "--collect-only", "-q"]
    if words[1] == "-m":
        return [*words, "--help"]
    return (
        [*words, "--cfg", "job"] if words[1].startswith("recipes/") and "cluster.dry_run=render" not in words else words
    )


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = short_form(shlex.split(line, comments=True))
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout


def test_page_has_commands_and_is_one_page() -> None:
    assert len(COMMANDS) >= 8
    assert TEXT.count("\n") <= 80


@pytest.mark.parametrize(("pattern", "limit"), LIMITS.items())
def test_limit_is_the_checked_one(pattern: str, limit: int) -> None:
    assert [int(number) for number in re.findall(pattern, " ".join(TEXT.split()))] == [limit]


def test_names_in_code_font_exist() -> None:
    """Files of the root, and names of classes, functions and constants."""
    code = " ".join(re.findall(r"`([^`\n]+)`", TEXT))
    for name in re.findall(r"(?<![\w./-])(?:\w+\.(?:md|toml|txt)|\.ci/\w+|Makefile|Dockerfile)\b", code):
        assert (REPOSITORY / name).is_file(), name
    for module in re.findall(r"python -m ([\w.]+)", TEXT):
        assert importlib.util.find_spec(module), module
    names = set(re.findall(r"(?<![\w./=-])_?[A-Za-z]\w+(?![\w./=(-])", code))
    known = {each for each in names if re.fullmatch(r"[A-Z]\w*[a-z]\w*|[A-Z_]{4,}|[a-z]+_\w+", each)} - FORBIDDEN
    assert {"ConfigError", "KINDS", "train_step"} <= known
    sources = "".join(file.read_text() for file in (REPOSITORY / "components").rglob("*.py"))
    assert {
        name for name in known if not re.search(rf"^(?:class|def) {name}\b|^{name}\b", sources, re.MULTILINE)
    } == set()
