"""YAML and JSON that others can change: what expands without bound is rejected within seconds, with a sentence."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config.compose.sources import CONF
from components.protocol.safe_parsing import DEEPEST, YamlLimitError, load_json, load_yaml, parse_json
from tests.config.composed import problems_of
from tests.frozen import frozen

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ["a: &a [x, x, x, x, x, x, x, x, x, x]"] + [
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
]
BOMB = "\n".join([*LEVELS, "run: {name: *i, resume: *i}", "peft: *i", "training: {max_steps: *i}"])
"""A billion values in 600 bytes."""

READERS = """
import contextlib, sys
from pathlib import Path
from components.checkpoint.load import _began_from
from components.config.compose.frozen import read_frozen, read_section
from components.protocol.errors import ConfigError
from tests.config.composed import problems_of
from components.config.schema import FinetuneConfig
from components.config.schema.run import RunConfig
from components.config.stored_run import read_config
from components.launch.run_directory_lock import check_changes
from components.observability.result import render_model_card

folder = Path(sys.argv[1])
file = folder / "config.yaml"
for read in (
    lambda: read_frozen(file, FinetuneConfig),
    lambda: read_section(file, "run", RunConfig),
    lambda: check_changes(file.read_text(), None, str(file)),
):
    try:
        read()
    except ConfigError as error:
        print(error)
print(read_config(folder), _began_from(folder), "max_steps" in render_model_card(folder, {}, "1"))
"""


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


def run_python(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "preexec_fn": limit_resources}
    return subprocess.run([sys.executable, *command], check=False, cwd=folder, env=environment, **options)


@pytest.mark.slow
def test_alias_bomb_in_run_directory_is_rejected_within_seconds(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(frozen(BOMB))
    (tmp_path / "state.json").write_text(json.dumps({"config": BOMB}))
    process = run_python(["-c", READERS, str(tmp_path)], tmp_path)
    assert process.returncode == 0, process.stderr
    *messages, rest = process.stdout.splitlines()
    assert len(messages) == 3
    for message in messages:
        assert message.startswith(str(tmp_path / "config.yaml"))
        assert "more than 100,000 values with aliases expanded" in message
    assert rest == "{} None False"


def test_alias_bomb_in_config_option_is_rejected_within_seconds(tmp_path: Path) -> None:
    option = tmp_path / "conf" / "experiment" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(BOMB)
    process = run_python([str(ROOT / "recipes/finetune.py"), "experiment=mine", "cluster.dry_run=true"], tmp_path)
    assert process.returncode == 2, process.stderr
    assert f"{option}: more than 100,000 values" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    "text",
    ["a: &a [*a]", "a: &a {b: {c: *a}}", "[" * 101 + "]" * 101, "[" * 100_000, "[" + "1," * 100_000 + "1]"],
    ids=["recursive", "nested recursion", "nested", "open", "long"],
)
def test_recursive_deep_or_long_yaml_is_rejected(text: str) -> None:
    with pytest.raises(YamlLimitError):
        load_yaml(text)


@pytest.mark.parametrize("text", [f"a: {'9' * 5000}", "a: *b", "a: [", "a: \x00", "!!python/name:os.system"])
def test_other_invalid_yaml_raises_yaml_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


def test_floats_without_a_dot_are_numbers_and_dates_are_texts() -> None:
    """YAML 1.1 reads 1e-4 as text; the files that omegaconf composes and those that are read here must agree."""
    found = load_yaml("[1e-4, 989.4e12, -2E3, .5, 1., -.inf, 2026-11-27, e5, 1e, ., 1.2.3]")
    assert found == [1e-4, 989.4e12, -2000.0, 0.5, 1.0, float("-inf"), "2026-11-27", "e5", "1e", ".", "1.2.3"]


def test_ordinary_aliases_are_expanded() -> None:
    text = "a: &a {b: 1, c: [x, y]}\nd: [*a, *a]\ne:\n  <<: *a\n  b: &n 2\nf: [*n]\n---\n"
    assert load_yaml(text.removesuffix("---\n")) == yaml.safe_load(text.removesuffix("---\n"))
    assert load_yaml("") is None


@pytest.mark.parametrize(("kind", "reason"), [("pipe", "Not a regular file"), ("huge", "Larger than 16,777,216 bytes")])
def test_config_folder_with_a_file_that_never_ends_is_rejected(tmp_path: Path, kind: str, reason: str) -> None:
    file = tmp_path / "optimizer" / "mine.yaml"
    file.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 10**10)
    (problem,) = problems_of("finetune", "optimizer=mine", folders=(tmp_path, CONF))
    assert problem == f"{file}: {reason}; remove it from the folder of configs"
    (problem,) = problems_of("finetune", "optimizer=mien", folders=(tmp_path, CONF))
    assert problem.startswith("optimizer=mien: no such option; did you mean mine?")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "nests more than"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nests more than"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nests more than"),
        (b'{"path": "\\ud800"}', "UTF-8"),
        (b'{"\\uDFFF": 1}', "UTF-8"),
        ('{"path": "\ud800"}', "UTF-8"),
        (b"\xff\xfe[\x001\x00]\x00", "UTF-8"),
        (b"9" * 5000, "5000 digits"),
        (b"", "Expecting value"),
    ],
)
def test_texts_that_the_json_module_accepts_or_fails_on_are_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_other_texts_give_the_values_of_the_json_module() -> None:
    deepest: list[object] = []
    for _ in range(DEEPEST - 1):
        deepest = [deepest]
    wide = [{"name": f"größe {index} 😀 {{[", "values": [1, None, 0.5]} for index in range(1000)]
    for value in (deepest, wide):
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only)
            assert parse_json(text) == parse_json(text.encode()) == parse_json(b"\xef\xbb\xbf" + text.encode()) == value


def test_pipes_devices_and_files_without_an_end_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as large:
        large.truncate(1 << 40)  # sparse
    for path in (tmp_path / "pipe", tmp_path / "large", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="regular file|Larger than|directory"):
            load_json(path)
