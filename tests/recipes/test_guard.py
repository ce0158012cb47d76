"""Runs reproduce the results in tests/guard/recorded.json; `python -m tests.guard compare` repeats all of them."""

from __future__ import annotations

import json
from pathlib import Path

import tests.guard
from tests.guard.__main__ import differences_of_runs, record_runs
from tests.guard.runs import RUNS
from tests.suites import in_parity

RECORDED = Path(tests.guard.__file__).with_name("recorded.json")
CHOSEN = ("before", "pp", "lora")
"""Float64 runs: the resume of a run directory of older code, and two meshes. Parity tests cover more."""


@in_parity
def test_runs_reproduce_the_recorded_results() -> None:
    found = record_runs([run for run in RUNS if run.name in CHOSEN])
    # Within rounding: CPUs of one model may still differ in their caches, and so in the order of a sum.
    differences = differences_of_runs(json.loads(RECORDED.read_text()), found, same_machine=False)
    assert not differences, "\n".join(differences)
