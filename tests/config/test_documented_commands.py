"""Every command that the README and the recipes show: it composes, and fits a laptop and a machine of 8 GPUs."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path

from components.config.validate import validate
from components.launch.machine import processes_of
from tests.config.commands import REPOSITORY
from tests.config.test_composition import RECIPES, compose

SHOWN_IN = ["README.md", "recipes/finetune.py", "recipes/pretrain.py", "recipes/evaluate.py"]
COMMAND = re.compile(  # but for those after a prompt: they are mistakes
    r"(?<!\$ )(?:python|torchrun (?P<ranks>[^|`]*?)) *recipes/(?P<recipe>\w+)\.py(?P<arguments>[^`|\n]*)"
)


def shown() -> list[tuple[str, str, str]]:
    """(recipe, options of torchrun, arguments) of each command."""
    found = []
    for name in SHOWN_IN:
        text = (REPOSITORY / name).read_text().replace("\\\n", " ")
        for match in COMMAND.finditer(text):
            arguments = shlex.join(shlex.split(match["arguments"], comments=True))
            found.append((match["recipe"], match["ranks"] or "", arguments))
    return sorted(set(found))


def points(arguments: list[str]) -> list[tuple[str, ...]]:
    """What a sweep runs; the arguments themselves without -m."""
    overrides = [each for each in arguments if each != "-m"]
    if len(overrides) == len(arguments):
        return [tuple(overrides)]
    choices = [each.partition("=") for each in overrides]
    return list(product(*([f"{key}={value}" for value in values.split(",")] for key, _, values in choices)))


def test_each_command_fits() -> None:
    """On a machine without GPUs, and on one with eight."""
    assert len(shown()) > 20
    for recipe, ranks, arguments in shown():
        for overrides in points(shlex.split(arguments)):
            cfg = compose(recipe, *overrides)
            asked = re.search(r"--nproc-per-node (\d+)", ranks)
            for processes in {int(asked[1])} if asked else {processes_of(cfg, gpus) for gpus in (0, 8)}:
                assert validate(cfg, processes) == [], (recipe, overrides, processes)


def test_experiments_and_recipes_fit_machines_of_any_size() -> None:
    experiments = ["", *(f"experiment={file.stem}" for file in Path(REPOSITORY / "conf/experiment").glob("*.yaml"))]
    for recipe, experiment in product(("finetune", "pretrain"), experiments):
        if recipe in RECIPES and (recipe == "finetune" or not experiment):
            cfg = compose(recipe, *filter(None, [experiment]))
            for processes in (1, 2, 4, 8):
                assert validate(cfg, processes) == [], (recipe, experiment, processes)
