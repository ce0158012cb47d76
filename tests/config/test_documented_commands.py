"""Every command in the README, docs/ and the recipes composes, and is valid on a laptop and with 8 GPUs."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path

from components.config.compose.sweep import expand_sweep
from components.config.rules import validate
from components.launch.machine import processes_of
from tests.config.commands import REPOSITORY
from tests.config.ready import EXPERIMENTS
from tests.config.test_composition import RECIPES, compose

DOCUMENTS = [
    "meshbook/__main__.py",
    "README.md",
    "AGENTS.md",
    *(f"recipes/{name}.py" for name in ("finetune", "pretrain", "dpo", "distill", "classify", "evaluate")),
    "scripts/teacher.py",
    *(str(file.relative_to(REPOSITORY)) for file in sorted((REPOSITORY / "docs").rglob("*.md"))),
]
COMMAND = re.compile(  # except after a prompt: those show errors
    r"(?<!\$ )(?:(?:python|torchrun (?P<ranks>[^|`]*?)) *(?:recipes/|scripts/(?=teacher))(?P<recipe>\w+)\.py"
    r"|\bmeshbook (?P<sweep>sweep )?(?P<command>finetune|pretrain|dpo|distill|classify|evaluate|teacher)\b)"
    r"(?P<arguments>[^`|>\n]*)"
)

PLANNED = re.compile(r"parallelism=(auto|plan:\d+)")
"""Meshes that the launcher replaces by those of the planner before it composes."""


def documented_commands() -> list[tuple[str, str, str]]:
    """Return (recipe, options of torchrun, arguments) of each documented command."""
    found = []
    for name in DOCUMENTS:
        text = (REPOSITORY / name).read_text().replace("\\\n", " ")
        for match in COMMAND.finditer(text):
            arguments = [*(["-m"] if match["sweep"] else []), *shlex.split(match["arguments"], comments=True)]
            if "--help" in arguments:  # a word after it is a section
                arguments = [argument for argument in arguments if "=" in argument]
            found.append((match["recipe"] or match["command"], match["ranks"] or "", shlex.join(arguments)))
    return sorted(set(found))


def points(recipe: str, arguments: list[str]) -> list[tuple[str, ...]]:
    """Return the overrides of the first and last run of a sweep; without -m the arguments themselves."""
    overrides = [each for each in arguments if not PLANNED.fullmatch(each)]
    if "-m" not in overrides:
        return [tuple(overrides)]
    found = expand_sweep(recipe, RECIPES[recipe], REPOSITORY / "recipes", overrides).points
    return [found[0].overrides, found[-1].overrides]


def test_documented_commands_are_valid() -> None:
    """On a machine without GPUs, and on one with eight."""
    assert len(documented_commands()) > 20
    for recipe, ranks, arguments in documented_commands():
        for overrides in points(recipe, shlex.split(arguments)):
            # test_evaluated_run.py tests run=RUN, which is replaced by the settings of a run before composition
            cfg = compose(recipe, *(each for each in overrides if not each.startswith("run=")))
            requested = re.search(r"--nproc-per-node (\d+)", ranks)
            for processes in {int(requested[1])} if requested else {processes_of(cfg, gpus) for gpus in (0, 8)}:
                assert validate(cfg, processes) == [], (recipe, overrides, processes)


def test_experiments_are_valid_for_any_number_of_processes() -> None:
    """Except those for a stated number of GPUs: test_ready_configs.py."""
    files = Path(REPOSITORY / "conf/experiment").glob("*.yaml")
    experiments = ["", *(f"experiment={file.stem}" for file in files if file.stem not in EXPERIMENTS)]
    for recipe, experiment in product(("finetune", "pretrain"), experiments):
        if recipe in RECIPES and (recipe == "finetune" or not experiment):
            cfg = compose(recipe, *filter(None, [experiment]))
            for processes in (1, 2, 4, 8):
                assert validate(cfg, processes) == [], (recipe, experiment, processes)
