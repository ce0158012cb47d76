"""The default data: identical in every process, built without output, and without leakage into the held-out split."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.config.schema.data import DocsDataConfig
from components.data.sources import pydocs
from components.protocol.errors import ConfigError

TRAIN, EVAL = pydocs.conversations("train"), pydocs.conversations("eval")
ROOT = Path(__file__).parents[2]

PRINT_ALL = """
import json
from components.data.sources import pydocs
print(json.dumps([c.messages for split in ("train", "eval") for c in pydocs.conversations(split)]))
"""


def build_in_subprocess(before: str = "", *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "-c", before + PRINT_ALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_known_function_gives_the_expected_conversation():
    (fill,) = [c for c in EVAL if c.where == "textwrap.fill"]
    question, answer = (message["content"] for message in fill.messages)
    assert question == "What does `textwrap.fill` do?"
    assert answer == (
        "`textwrap.fill(text, width=70, **kwargs)`\n\nFill a single paragraph of text, returning a new string."
    )


def test_split_sizes_and_a_tenth_of_the_packages_held_out():
    assert len(TRAIN) > 1200
    assert 80 < len(EVAL) < 200
    packages = {module.partition(".")[0] for module in pydocs.MODULES}
    held_out = {package for package in packages if pydocs.is_held_out(package)}
    assert 0.08 < len(held_out) / len(packages) < 0.12
    assert {"email", "subprocess", "textwrap", "uuid"} <= held_out


def test_splits_share_no_package_and_no_question_or_docstring_repeats():
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
def test_other_processes_build_the_same_data_without_warnings():
    here = [c.messages for c in [*TRAIN, *EVAL]]
    for flags, before in ((["-W", "error"], ""), ([], "import torch, transformers, datasets\n")):
        other = build_in_subprocess(before, *flags)
        assert json.loads(other.stdout) == here
        assert other.stderr == ""


def test_text_contains_no_address_or_path_of_this_machine():
    for conversation in [*TRAIN, *EVAL]:
        text = "".join(message["content"] for message in conversation.messages)
        assert not re.search(r" at 0x|<(class|object|function|module)", text), conversation
        assert sys.prefix not in text
        assert str(Path.home()) + "/" not in text


def test_python_without_docstrings_is_rejected():
    other = build_in_subprocess("", "-OO")
    assert "ConfigError: data=pydocs: python -OO (PYTHONOPTIMIZE=2) removes the docstrings" in other.stderr


@pytest.mark.parametrize("key", ["split", "eval_split"])
def test_unknown_splits_are_rejected(key):
    with pytest.raises(ConfigError, match=rf"data.{key}=test: must be train or eval"):
        DocsDataConfig(**{key: "test"})
