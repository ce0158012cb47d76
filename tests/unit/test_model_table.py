"""docs/models.md is what its generator writes from the cases of the tests."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from tests import model_table
from tests.config.ready import HUB_MODELS
from tests.distributed import test_lora, test_tp_plan

pytestmark = pytest.mark.skipif(
    os.environ.get("MESHBOOK_ALL_PARITY") == "1", reason="the lists of cases are then those of make parity"
)


def test_the_file_is_what_the_generator_writes() -> None:
    assert model_table.FILE.read_text() == model_table.render(), "run: python -m tests.model_table --write"


def test_a_cell_is_empty_without_its_case() -> None:
    """The marks follow from the cases: without them the cell says that nothing tests it."""
    whole = model_table.collect()
    assert whole.levels["all parameters", "stablelm", "tp"] is model_table.Level.ci
    assert whole.levels["QLoRA", "llama", "dp_shard"] is model_table.Level.ci
    others = {name: each for name, each in test_tp_plan.FAMILIES.items() if each["model_type"] != "stablelm"}
    lora = {
        world: [each for each in cases if not each.peft.quantizes] for world, cases in test_lora.DEFAULT_CASES.items()
    }
    with mock.patch.object(test_tp_plan, "FAMILIES", others), mock.patch.object(test_lora, "DEFAULT_CASES", lora):
        fewer = model_table.collect()
    assert fewer.levels["all parameters", "stablelm", "tp"] is model_table.Level.nothing
    assert fewer.levels["QLoRA", "llama", "dp_shard"] is model_table.Level.parity


def test_every_option_and_its_family_have_a_row() -> None:
    lines = model_table.FILE.read_text().splitlines()
    for name, option in HUB_MODELS.items():
        assert any(line.startswith(f"| `{name}` | `{option.values['path']}` |") for line in lines), name
        assert any(line.startswith(f"| `{option.values['family']}` | ") for line in lines), name
