"""Every pattern of library messages in `explain` matches errors raised by the installed Hydra, omegaconf and PyYAML."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, IntegerNode, OmegaConf

from components.config.compose import explain
from components.config.compose.sources import CONF, Request, register_schemas
from components.config.schema import FinetuneConfig

OURS = ("HOME", "SWEEP_FUNCTION")
"""Patterns of the user's command line, not of a library's message."""
PATTERNS = {name: each for name, each in vars(explain).items() if isinstance(each, re.Pattern) and name not in OURS}


@dataclass
class Inner:
    number: int = 1


class Color(Enum):
    red = 1


@dataclass
class Schema:
    number: int = 1
    share: float = 1.0
    flag: bool = False
    text: str = ""
    color: Color = Color.red
    names: list[str] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def assigned(key: str, value: Any) -> str:
    """Return omegaconf's message for an invalid value of a field."""
    node = OmegaConf.structured(Schema)
    return message(lambda: node.__setitem__(key, value))


def overridden(override: str) -> str:
    """Return Hydra's message for an override of a composed config."""
    cfg: DictConfig = copy.deepcopy(OmegaConf.structured(FinetuneConfig))
    parsed = OverridesParser.create().parse_override(override)
    return message(lambda: ConfigLoaderImpl._apply_overrides_to_config([parsed], cfg))


def composed(*overrides: str) -> str:
    """Return Hydra's message for options of the real conf/."""
    register_schemas("finetune", FinetuneConfig)
    return message(lambda: Request("finetune", FinetuneConfig, (CONF,), ()).compose(overrides))


def composed_with(folder: Path, text: str) -> str:
    """Return Hydra's message for an experiment file with this text."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)
    register_schemas("finetune", FinetuneConfig)
    request = Request("finetune", FinetuneConfig, (CONF, folder), ())
    return message(lambda: request.compose(["experiment=mine"]))


def message(provoke: Callable[[], object]) -> str:
    try:
        provoke()
    except Exception as error:
        return f"{error} {error.__cause__ or ''}"
    raise AssertionError("nothing was raised")


CASES: list[tuple[str, Callable[[Path], str], dict[str, str]]] = [
    ("NOT_CONVERTIBLE", lambda _: assigned("number", "x"), {"wanted": "Integer"}),
    ("NOT_CONVERTIBLE", lambda _: assigned("share", "x"), {"wanted": "Float"}),
    ("NOT_A_BOOL", lambda _: assigned("flag", "x"), {}),
    ("NOT_A_CHOICE", lambda _: assigned("color", "blue"), {"choices": "red"}),
    ("GIVEN", lambda _: assigned("color", "blue"), {"value": "blue"}),
    ("NOT_OPTIONAL", lambda _: assigned("number", None), {}),
    ("NOT_OPTIONAL", lambda _: overridden("training.seq_len=null"), {}),
    ("NOT_OPTIONAL", lambda _: message(lambda: IntegerNode(None, is_optional=False)), {}),
    ("NULL_TEXT", lambda folder: composed_with(folder, "# @package _global_\ncluster: {env: {A: ~}}"), {}),
    ("NULL_TEXT", lambda folder: composed_with(folder, "# @package _global_\ncluster: {setup: [null]}"), {}),
    ("NOT_A_LIST", lambda _: overridden("peft.targets=3"), {}),
    ("NOT_A_SECTION", lambda _: overridden("training=3"), {}),
    ("NOT_A_SECTION", lambda _: overridden("training=[1]"), {}),
    ("NOT_A_SECTION", lambda _: assigned("free", 3), {}),
    ("NOT_A_SINGLE_VALUE", lambda _: assigned("color", {"a": 1}), {}),
    ("NOT_A_SINGLE_VALUE", lambda _: assigned("number", {"a": 1}), {}),
    ("NOT_A_SINGLE_VALUE", lambda _: assigned("number", [1]), {}),
    ("NOT_A_SINGLE_VALUE", lambda _: overridden("run.dir={a:1}"), {}),
    ("NOT_A_SINGLE_VALUE", lambda _: overridden("run.dir=[1]"), {}),
    ("FULL_KEY", lambda _: overridden("training.max_steps=x"), {"key": "training.max_steps"}),
    ("NULL_KEY", lambda folder: composed_with(folder, "# @package _global_\ncluster: {env: {null: a}}"), {}),
    ("KEY_IS_NO_TEXT", lambda _: overridden("++cluster.env={1e3: a}"), {"name": "1000.0"}),
    ("UNKNOWN_KEY", lambda _: overridden("training.steps=1"), {"leaf": "steps", "schema": "TrainingConfig"}),
    ("NO_DELETION", lambda _: overridden("~training.max_steps"), {}),
    ("MERGING", lambda _: overridden("training.max_steps=x"), {}),
    ("ALREADY_THERE", lambda _: overridden("+training.max_steps=1"), {}),
    ("ALREADY_THERE", lambda _: composed("+model=tiny"), {}),
    (
        "SECOND_OPTION",
        lambda tmp: composed_with(tmp, "# @package _global_\ndefaults:\n  - /peft: lora\n"),
        {"group": "peft", "option": "lora"},
    ),
    ("NOTHING_TO_OVERRIDE", lambda _: overridden("training.steps=1"), {}),
    ("NO_SUCH_KEY", lambda _: overridden("training.steps=1"), {}),
    ("NO_SUCH_KEY", lambda _: overridden("+training.max_steps=1"), {}),
    ("NO_SUCH_KEY", lambda _: overridden("~training.steps"), {}),
    ("NOT_AN_OPTION", lambda _: composed("model=5"), {}),
    ("IN_FILE", lambda folder: composed_with(folder, "training:\n  steps: 1\n"), {"file": "experiment/mine"}),
    ("NO_OPTION", lambda _: composed("model=nope"), {"group": "model", "option": "nope"}),
    ("NO_OPTION", lambda _: composed("model=[smollm2_135m,nope]"), {"group": "model", "option": "nope"}),
    ("NO_OPTION", lambda folder: composed_with(folder, "defaults: [/model/nope]\n"), {"file": "experiment/mine"}),
    ("NO_GROUP", lambda folder: composed_with(folder, "defaults: [{override /nope: a}]\n"), {"group": "nope"}),
    ("REJECTED_KIND", lambda _: composed("objective=dpo"), {"section": "objective", "kind": "dpo"}),
    ("NOT_YAML", lambda folder: composed_with(folder, "a: [1\nb: 2\n"), {"line": "2"}),
    ("NOT_YAML", lambda folder: composed_with(folder, "a: b: 2\n"), {"what": "mapping values are not allowed here"}),
    ("NOT_YAML", lambda folder: composed_with(folder, "a:\n\t- 1\n"), {"line": "2"}),
    ("NOT_YAML", lambda folder: composed_with(folder, "a: 'b\n"), {"line": "2"}),
    ("NOT_YAML", lambda folder: composed_with(folder, "a: *b\n"), {"what": "found undefined alias 'b'"}),
]


@pytest.mark.parametrize(("name", "provoke", "groups"), CASES, ids=[name for name, _, _ in CASES])
def test_pattern_matches_the_message_of_the_installed_version(
    name: str, provoke: Callable[[Path], str], groups: dict[str, str], tmp_path: Path
) -> None:
    text = provoke(tmp_path)
    found = PATTERNS[name].search(text)
    assert found is not None, text
    assert {key: found[key] for key in groups} == groups


def test_every_pattern_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == PATTERNS.keys()


@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if "(?P" not in pattern.pattern])
def test_every_alternative_has_a_case(name: str, tmp_path: Path) -> None:
    texts = [provoke(tmp_path) for case, provoke, _ in CASES if case == name]
    for alternative in re.split(r"\|(?![^(]*\))", PATTERNS[name].pattern):
        assert any(re.search(alternative, text) for text in texts), alternative
