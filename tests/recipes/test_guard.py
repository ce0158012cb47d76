"""Runs give what they gave when tests/guard/recorded.json was made; `python -m tests.guard compare` repeats all."""

from __future__ import annotations

import json
from pathlib import Path

import tests.guard
from tests.guard.__main__ import differences_of_runs, record_runs
from tests.guard.runs import RUNS

RECORDED = Path(tests.guard.__file__).with_name("recorded.json")
CHOSEN = ("before", "pp", "moe")
"""A run directory of older code that is resumed, and two meshes; the others repeat what parity tests compare."""


def test_runs_give_what_was_recorded() -> None:
    found = record_runs([run for run in RUNS if run.name in CHOSEN])
    differences = differences_of_runs(json.loads(RECORDED.read_text()), found)
    assert not differences, "\n".join(differences)
