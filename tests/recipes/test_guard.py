"""Runs give what they gave when tests/guard/recorded.json was made; `python -m tests.guard compare` repeats all."""

from __future__ import annotations

import json
from pathlib import Path

import tests.guard
from tests.guard.__main__ import differences_of_runs, record_runs
from tests.guard.runs import RUNS

RECORDED = Path(tests.guard.__file__).with_name("recorded.json")
CHOSEN = ("before", "pp", "lora")
"""In float64: a run directory of older code that is resumed, and two meshes; parity tests compare more."""


def test_runs_give_what_was_recorded() -> None:
    found = record_runs([run for run in RUNS if run.name in CHOSEN])
    # Within rounding: processors of one name may still differ in their caches, and so in how a sum is ordered.
    differences = differences_of_runs(json.loads(RECORDED.read_text()), found, same_machine=False)
    assert not differences, "\n".join(differences)
