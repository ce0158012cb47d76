"""Random invalid command lines: exit status 2, all errors reported without traceback, no files written, quickly.

Another seed: MESHBOOK_SEED=7 (lines 7000, 7001, ...). 300 lines with MESHBOOK_TORTURE=1.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.config.commands import Commands, placeholder_recipe
from tests.config.random_lines import ENVIRONMENT, SECRET, wrong_line

LINES = 300 if os.environ.get("MESHBOOK_TORTURE") else 12
FIRST = int(os.environ.get("MESHBOOK_SEED", "1")) * 1000
SECONDS = 1.0 if os.environ.get("MESHBOOK_TORTURE") else 2.0
"""Limit of CPU time per command, without the shared imports; CI machines are slow and shared."""


def test_random_invalid_command_lines_are_rejected_with_all_errors(commands: Commands, tmp_path: Path) -> None:
    recipe = placeholder_recipe(tmp_path, "finetune", "FinetuneConfig")
    empty = tmp_path / "empty"
    empty.mkdir()
    failed = []
    for seed in range(FIRST, FIRST + LINES):
        line = wrong_line(seed)
        ended = commands.run(recipe, line.arguments, empty, **ENVIRONMENT)
        lines = ended.errors.splitlines()
        missing = [message for message in line.messages if not any(each.startswith(message) for each in lines)]
        counted = len(lines) == 1 or lines[:1] == [f"{len(lines) - 1} problems with this run:"]
        if (
            ended.status != 2
            or "Traceback" in ended.errors
            or ended.imported_torch
            or missing
            or not counted
            or len(lines) > 2 * len(line.messages) + 2
            or SECRET in ended.errors
            or os.listdir(empty)
            or ended.cpu_seconds > SECONDS
        ):
            failed.append(f"{seed}: {line.arguments} without {missing}, {ended.cpu_seconds:.2f} s:\n{ended.errors}")
    assert not failed, f"{len(failed)} of {LINES}\n" + "\n".join(failed)


def test_random_command_lines_differ_and_have_several_errors() -> None:
    made = [wrong_line(seed) for seed in range(500)]
    assert len({line.arguments for line in made}) > 490
    assert all(line.messages for line in made)
    assert max(len(line.messages) for line in made) >= 5
