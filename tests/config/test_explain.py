"""Every pattern of Hydra's messages in `explain` matches errors that the installed version raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import HydraException

from components.config.compose import explain
from components.config.compose.sources import CONF, parsed, read_files
from tests.config.composed import request

OURS = ("HOME", "SWEEP_FUNCTION")
"""Patterns of the user's command line, not of a library's message."""
PATTERNS = {name: each for name, each in vars(explain).items() if isinstance(each, re.Pattern) and name not in OURS}


def composed(*options: str, folders: tuple[Path, ...] = (CONF,)) -> str:
    """Return Hydra's message for options of the real conf/."""
    with pytest.raises(HydraException) as caught:
        read_files(request("finetune", folders=folders), map(parsed, options))
    return str(caught.value)


def composed_with(folder: Path, text: str) -> str:
    """Return Hydra's message for an experiment file with this text."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)
    return composed("experiment=mine", folders=(CONF, folder))


CASES: list[tuple[str, Callable[[Path], str], dict[str, str]]] = [
    ("IN_FILE", lambda folder: composed_with(folder, "defaults: [/model/nope]\n"), {"file": "experiment/mine"}),
    ("IN_FILE", lambda folder: composed_with(folder, "defaults: [{override /nope: a}]\n"), {"file": "experiment/mine"}),
    ("NO_GROUP", lambda folder: composed_with(folder, "defaults: [{override /nope: a}]\n"), {"group": "nope"}),
    ("NO_GROUP", lambda _: composed("data@data.sources.x=gsm8k"), {"group": "data"}),
    ("SECOND_OPTION", lambda _: composed("+model=tiny"), {"group": "model", "option": "tiny"}),
    (
        "SECOND_OPTION",
        lambda tmp: composed_with(tmp, "# @package _global_\ndefaults:\n  - /peft: lora\n"),
        {"group": "peft", "option": "lora"},
    ),
]


@pytest.mark.parametrize(("name", "provoke", "groups"), CASES, ids=[name for name, _, _ in CASES])
def test_pattern_matches_the_message_of_the_installed_version(
    name: str, provoke: Callable[[Path], str], groups: dict[str, str], tmp_path: Path
) -> None:
    text = provoke(tmp_path)
    found = PATTERNS[name].search(text)
    assert found is not None, text
    assert {key: found[key] for key in groups} == groups


def test_every_pattern_has_a_case_and_there_are_few() -> None:
    assert {name for name, _, _ in CASES} == PATTERNS.keys()
    assert len(PATTERNS) <= 4
