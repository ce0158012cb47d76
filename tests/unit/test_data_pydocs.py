"""The default data: the same in every process, quiet, and without leaks into evaluation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.config.errors import ConfigError
from components.config.schema.data import DocsDataConfig
from components.data.sources import pydocs

TRAIN, EVAL = pydocs.conversations("train"), pydocs.conversations("eval")
ROOT = Path(__file__).parents[2]

PRINT_ALL = """
import json
from components.data.sources import pydocs
print(json.dumps([c.messages for split in ("train", "eval") for c in pydocs.conversations(split)]))
"""


def in_another_process(before: str = "", *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "-c", before + PRINT_ALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_known_function():
    (fill,) = [c for c in EVAL if c.where == "textwrap.fill"]
    question, answer = (message["content"] for message in fill.messages)
    assert question == "What does `textwrap.fill` do?"
    assert answer == (
        "`textwrap.fill(text, width=70, **kwargs)`\n\nFill a single paragraph of text, returning a new string."
    )


def test_there_is_enough_and_about_a_tenth_of_the_packages_is_held_out():
    assert len(TRAIN) > 1200
    assert 80 < len(EVAL) < 200
    packages = {module.partition(".")[0] for module in pydocs.MODULES}
    held_out = {package for package in packages if pydocs.is_held_out(package)}
    assert 0.08 < len(held_out) / len(packages) < 0.12
    assert {"email", "subprocess", "textwrap", "uuid"} <= held_out


def test_no_package_no_question_and_no_docstring_is_on_both_sides():
    def packages(conversations):
        return {c.where.partition(".")[0] for c in conversations}

    def summaries(conversations):
        return [c.messages[1]["content"].rpartition("`\n\n")[2] for c in conversations]

    assert not packages(TRAIN) & packages(EVAL)
    everything = summaries(TRAIN) + summaries(EVAL)
    assert len(set(everything)) == len(everything)
    questions = [c.messages[0]["content"] for c in [*TRAIN, *EVAL]]
    assert len(set(questions)) == len(questions)


@pytest.mark.slow
def test_another_process_asks_the_same_in_silence_even_beside_libraries_that_patch_the_interpreter():
    here = [c.messages for c in [*TRAIN, *EVAL]]
    for flags, before in ((["-W", "error"], ""), ([], "import torch, transformers, datasets\n")):
        other = in_another_process(before, *flags)
        assert json.loads(other.stdout) == here
        assert other.stderr == ""


def test_nothing_of_this_machine_is_in_the_text():
    for conversation in [*TRAIN, *EVAL]:
        text = "".join(message["content"] for message in conversation.messages)
        assert not re.search(r" at 0x|<(class|object|function|module)", text), conversation
        assert sys.prefix not in text
        assert str(Path.home()) + "/" not in text


def test_a_python_without_docstrings_is_told():
    other = in_another_process("", "-OO")
    assert "ConfigError: data=pydocs: python -OO (PYTHONOPTIMIZE=2) removes the docstrings" in other.stderr


@pytest.mark.parametrize("key", ["split", "eval_split"])
def test_other_splits_are_refused(key):
    with pytest.raises(ConfigError, match=rf"data.{key}=test: must be train or eval"):
        DocsDataConfig(**{key: "test"})
