"""The hub, through `datasets` in processes of its own: it reads its environment when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_data_files import ROWS, write

HUB_SCRIPT = """
import sys
from components.config.errors import ConfigError
from components.data.sources.files import Location
from components.data.sources.hub_rows import hub_files, hub_rows
columns = {"prompt_column": sys.argv[2], "response_column": "response"}
try:
    place = Location("data.path", sys.argv[1], sys.argv[3])
    for row in hub_rows(place, None, None, columns):
        print(row.where.split("/")[-1], sorted(row.values), row.values["response"])
        mapped = open("/proc/self/maps").read()
    print("mapped:", [file.name for file in hub_files(place, None, None) if str(file) in mapped])
except ConfigError as error:
    print("ConfigError", error)
"""


def start_hub_reader(cache: Path, name: str, column: str = "prompt", split: str = "train") -> subprocess.Popen:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", HUB_SCRIPT, name, column, split],
        env=environment,
        cwd=Path(__file__).parents[2],
        text=True,
        stdout=subprocess.PIPE,
    )


@pytest.mark.slow
def test_several_processes_may_fill_the_cache_of_datasets_at_once(tmp_path):
    """A folder stands for the hub: `datasets` builds its cache from it in the same way."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write(folder / "train.jsonl", [{**row, "other": 1} for row in ROWS[:1]] * 50)
    readers = [start_hub_reader(tmp_path / "cache", str(folder)) for _ in range(3)]
    expected = "".join(f"repository row {i} ['prompt', 'response'] Three.\n" for i in range(1, 51))
    expected += "mapped: ['repository-train.arrow']\n"
    assert [reader.communicate(timeout=120)[0] for reader in readers] == [expected] * 3
    wrong = start_hub_reader(tmp_path / "cache", str(folder), column="promt").communicate(timeout=120)[0]
    assert wrong == (
        f"ConfigError data.prompt_column=promt: {folder} has no such column, it has prompt, response, other; "
        "did you mean 'prompt'?\n"
    )
    split = start_hub_reader(tmp_path / "cache", str(folder), split="test").communicate(timeout=120)[0]
    assert "ConfigError" in split
    assert "loading its split 'test' from the hub failed" in split


def test_a_hub_name_without_a_network_is_explained(tmp_path):
    said = start_hub_reader(tmp_path, "no-such-owner/no-such-data").communicate(timeout=120)[0]
    assert said.startswith(
        "ConfigError data.path=no-such-owner/no-such-data: is not a local file, and loading its split "
        "'train' from the hub failed (data.subset=null): "
    )
    assert "Traceback" not in said
