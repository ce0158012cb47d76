"""Hub datasets, read in subprocesses because `datasets` reads its environment variables at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.suites import in_torture
from tests.unit.test_data_files import ROWS, write

HUB_SCRIPT = """
import sys
from components.protocol.errors import ConfigError
from components.data.sources.files import Location
from components.data.sources.split import hub_files, hub_rows
columns = {"prompt_column": sys.argv[2], "response_column": "response"}
try:
    location = Location("data.path", sys.argv[1], sys.argv[3])
    for row in hub_rows(location, None, None, columns):
        print(row.where.split("/")[-1], sorted(row.values), row.values["response"])
        mapped = open("/proc/self/maps").read()
    print("mapped:", [file.name for file in hub_files(location, None, None) if str(file) in mapped])
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


@in_torture
def test_concurrent_processes_can_fill_the_datasets_cache(tmp_path):
    """A local folder replaces the hub repository: `datasets` builds its cache from both in the same way."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write(folder / "train.jsonl", [{**row, "other": 1} for row in ROWS[:1]] * 50)
    readers = [start_hub_reader(tmp_path / "cache", str(folder)) for _ in range(3)]
    expected = "".join(f"repository row {i} ['prompt', 'response'] Three.\n" for i in range(1, 51))
    expected += "mapped: ['repository-train.arrow']\n"
    assert [reader.communicate(timeout=120)[0] for reader in readers] == [expected] * 3
    wrong_column = start_hub_reader(tmp_path / "cache", str(folder), column="promt").communicate(timeout=120)[0]
    assert wrong_column == (
        f"ConfigError data.prompt_column=promt: {folder} has no such column, it has prompt, response, other; "
        "did you mean 'prompt'?\n"
    )
    wrong_split = start_hub_reader(tmp_path / "cache", str(folder), split="test").communicate(timeout=120)[0]
    assert "ConfigError" in wrong_split
    assert "loading its split 'test' from the hub failed" in wrong_split


def test_hub_dataset_without_network_is_reported(tmp_path):
    output = start_hub_reader(tmp_path, "no-such-owner/no-such-data").communicate(timeout=120)[0]
    assert output.startswith(
        "ConfigError data.path=no-such-owner/no-such-data: is not a local file, and loading its split "
        "'train' from the hub failed (data.subset=null): "
    )
    assert "Traceback" not in output
