"""The recorded counts and predictions, and the pages made of them: see table.py."""

from __future__ import annotations

import pytest

from scripts._gpu.speed import PREDICTED
from tests.gpu_ready import table
from tests.gpu_ready.matrix import LEVERS, PAIRS, peak_tolerance, planned_memory


def test_every_pair_of_the_matrix_is_recorded() -> None:
    """The old code has one objective and one optimizer, and experts that autocast did not reach."""
    assert set(table.recorded(table.COUNTS)) == set(PAIRS)
    had_before = {pair for pair in PAIRS if not {"objective", "optimizer"} & LEVERS[pair[0]].keys()}
    had_before.discard(("experts, autocast", "single"))
    assert set(table.recorded(table.BEFORE)) == had_before


@pytest.mark.parametrize("lever", table.LIMITS)
def test_layers_launch_no_more_kernels_than_acceptable(lever: str) -> None:
    assert table.recorded(table.COUNTS)[lever, "single"]["launches"] <= table.LIMITS[lever]


def test_planner_agrees_with_the_recorded_peaks() -> None:
    """Formulas against the sum of all live storages on fake CUDA tensors."""
    for key, row in table.recorded(table.COUNTS).items():
        for rank, counted in row["peaks"]:
            planned = planned_memory(*key, rank)
            assert planned.peak == pytest.approx(counted, rel=peak_tolerance(*key)), (key, rank, planned)


def test_predictions_reach_their_targets() -> None:
    """The assumed rates of a GPU still give the speed that was first predicted with them, within 2 %."""
    found = table.speeds()
    assert found["1B full", "H200"]["before, as dispatched"] == pytest.approx(table.NOTED, rel=0.02)
    fastest = {key: columns["now, compiled, FlashAttention 3"] for key, columns in found.items()}
    for key, target in table.TARGETS.items():
        assert fastest[key] >= target
    for device in ("H200", "H100"):
        for column in ("now, not compiled", "now, compiled", "now, compiled, FlashAttention 3", "by auto"):
            assert found["8B LoRA", device][column] / found["8B QLoRA", device][column] <= 1.1


def test_the_checks_on_a_gpu_expect_what_is_predicted_for_auto() -> None:
    names = {"full_1b": "1B full", "lora_8b": "8B LoRA", "qlora_8b": "8B QLoRA"}
    found = table.speeds()
    for check, predictions in PREDICTED.items():
        for device, rate in predictions.items():
            assert rate == round(found[names[check], device]["by auto"]), (check, device)


def test_pages_are_current() -> None:
    """Run python -m tests.gpu_ready.table."""
    assert table.PAGE.read_text() == table.page()
    assert table.RESULTS.read_text() == table.results()
