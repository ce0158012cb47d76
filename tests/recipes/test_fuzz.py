"""Fixed random configurations: the recipes against plain transformers. `make fuzz` draws new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.cases import draw_case
from tests.fuzz.compare import run_case
from tests.suites import TORTURE, select

CASES = select((0, 2, 4, 5, 10, 11, 14, 15, 21, 22), (4,), TORTURE)


@pytest.mark.parametrize("index", CASES)
def test_random_configuration_matches_plain_transformers(index: int, tmp_path: Path) -> None:
    finding = run_case(draw_case(2, index), tmp_path)
    assert finding.outcome == "equal", str(finding)
