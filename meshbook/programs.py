"""The recipes and tools: where they are, what they do, and how one is started."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from components.package import HELP, PROJECT
from components.terminal import exit_with

COMMAND = "meshbook"
_STARTED_BY_PYTHON = re.compile(r"python (?:recipes|scripts)/(\w+)\.py")
OTHER_COMMANDS = {
    "sweep": "Run a recipe for several values: meshbook sweep RECIPE KEY=A,B",
    "copy": "Copy a recipe: meshbook copy RECIPE FILE",
    "help": "Describe a section, a key, a recipe or a tool: meshbook help NAME",
    "completion": "Print the completion script of a shell: meshbook completion bash",
}
"""Commands that are neither a recipe nor a tool."""
ELSEWHERE = {
    "finetune": "train sft tune run full_finetune lora lora_finetune fine-tune",
    "pretrain": "pt cpt",
    "dpo": "kto orpo rlhf simpo",
    "grpo": "rl rloo ppo dapo gspo rlvr",
    "classify": "reward rm",
    "evaluate": "eval",
    "chat": "infer inference generate serve",
    "export": "merge merge-lora merge_lora deploy",
    "doctor": "env",
    "tokenize": "preprocess",
}
"""Command -> names of it in other trainers."""
_SHORT_NAMES = {"tokenize_corpus": "tokenize"}
"""Commands of tools by file. A file tokenize.py would hide the standard library's module from its neighbors."""


@dataclass(frozen=True, slots=True)
class Program:
    """A recipe (recipes/NAME.py) or a tool (scripts/NAME.py, but see `_SHORT_NAMES`)."""

    name: str
    file: Path

    @property
    def documentation(self) -> str:
        """Docstring of the file, read without running it."""
        return ast.get_docstring(ast.parse(self.file.read_text("utf-8"))) or ""

    @property
    def purpose(self) -> str:
        """First sentence of the docstring."""
        return self.documentation.partition("\n")[0].rstrip(".")


def recipes() -> dict[str, Program]:
    """Return the recipes by name."""
    return _programs(PROJECT / "recipes")


def tools() -> dict[str, Program]:
    """Return the tools by name."""
    return _programs(PROJECT / "scripts")


def _programs(folder: Path) -> dict[str, Program]:
    files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    names = {file: _SHORT_NAMES.get(file.stem, file.stem) for file in files}
    return {name: Program(name, file) for file, name in names.items()}


def start_recipe(recipe: Program, arguments: list[str]) -> NoReturn:
    """Run a recipe as `python recipes/NAME.py ARGUMENTS` does, with this command in its help; exit with its status."""
    sys.argv = [str(recipe.file), *arguments]
    sys.path[0] = str(recipe.file.parent)
    runpy.run_path(str(recipe.file), {HELP: with_command(recipe.documentation)}, run_name="__main__")
    sys.exit()


def start_tool(tool: Program, arguments: list[str]) -> NoReturn:
    """Run a tool as `python scripts/NAME.py ARGUMENTS` does, with this command in its help, and exit."""
    sys.path[0] = str(PROJECT)  # so that `scripts` is this project's, not a folder of the user's
    module = importlib.import_module(f"scripts.{tool.file.stem}")
    if hasattr(module.main, "__wrapped__"):  # decorated with @recipe: its ranks start from the file
        start_recipe(tool, arguments)
    sys.argv = [f"{COMMAND} {tool.name}", *arguments]
    text = (module.__doc__ or "").replace(f"scripts/{tool.file.name}", f"scripts/{tool.name}.py")
    module.__doc__ = with_command(text)
    exit_with(module.main)


def with_command(text: str) -> str:
    """Return a docstring in which this command starts the recipes and tools, instead of python."""
    return _STARTED_BY_PYTHON.sub(rf"{COMMAND} \1", text)
