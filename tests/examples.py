"""The READMEs of examples/, and copies of their folders with the recipes that the READMEs make."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
OUTDATED = """
recipes/finetune.py has changed, and the example's patch no longer fits.
Change a copy of the recipe, FILE, as the patch does, run
diff -U1 --label a/recipes/finetune.py --label b/recipes/finetune.py recipes/finetune.py FILE >examples/NAME/train.patch
and show the new patch in the example's README.
"""


def blocks(name: str, language: str) -> list[str]:
    """Return the code blocks of an example's README in a language, with continued lines joined."""
    text = (EXAMPLES / name / "README.md").read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", "") for block in found]


def commands(name: str) -> list[str]:
    """Return the commands of an example's README."""
    return [line for block in blocks(name, "bash") for line in block.splitlines()]


def words(command: str, examples: Path = EXAMPLES) -> list[str]:
    """Split a command, and make its paths absolute; `examples` replaces the folder examples/."""
    folders = {"examples/": examples.parent, "recipes/": ROOT}
    return [
        next((str(parent / word) for start, parent in folders.items() if word.startswith(start)), word)
        for word in shlex.split(command)
    ]


def copy_example(name: str, folder: Path) -> Path:
    """Copy an example to folder/examples, and make its train.py there with the README's commands, if it has any."""
    copied = folder / "examples" / name
    making = [command for command in commands(name) if not command.startswith("python ")]
    made = ["train.py"] if making else []
    shutil.copytree(EXAMPLES / name, copied, ignore=shutil.ignore_patterns("__pycache__", *made))
    for command in making:
        require_program(shlex.split(command)[0])
        done = subprocess.run(words(command, copied.parent), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + OUTDATED
    return copied


def require_program(name: str, package: str = "") -> None:
    """Skip the test if a program is missing; fail it in CI, which installs the Debian package."""
    if shutil.which(name) is None:
        message = f"there is no {name} (Debian: {package or name})"
        (pytest.fail if os.environ.get("MESHBOOK_REQUIRE_SLURM") == "1" else pytest.skip)(message)
