"""Gates of the benchmarks that compare float32 loss curves: rounding passes, a planted fault is detected."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.config.schema.optimizer import OptimizerConfig
from components.planning import parity as comparison
from scripts.benchmark import pretrain_curve, step_overhead
from scripts.benchmark.compare_report import FLOAT32_BOUND, GATED_STEPS, gated_difference
from scripts.benchmark.pretrain_curve import BOUNDS, Curve
from scripts.benchmark.step_overhead import OPTIMIZER, Arm
from tests.harness import run_ranks

TINY = (32, 2, 2, 32)
"""Hidden size, layers, rows per step, tokens per row."""


def freeze_norm(model: Any) -> None:
    model.model.norm.weight.requires_grad_(False)


def perturb_weights(model: Any) -> None:
    """Move every weight to the next float: more noise than another summation order on another CPU causes."""
    for parameter in model.parameters():
        parameter.data = torch.nextafter(parameter.data, torch.full_like(parameter, math.inf))


def halve_gradient(model: Any) -> None:
    """Halve the gradient of one MLP and of everything below it. AdamW is invariant to halving all gradients."""
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda _, __, output: output * 0.5 + output.detach() * 0.5
    )


FAULTS: dict[str, tuple[Callable[[Any], None], OptimizerConfig]] = {
    "learning rate off by 1 %": (lambda _: None, replace(OPTIMIZER, lr=1.01 * OPTIMIZER.lr)),
    "wrong beta": (lambda _: None, replace(OPTIMIZER, betas=[0.9, 0.96])),
    "weight decay": (lambda _: None, replace(OPTIMIZER, weight_decay=0.1)),
    "untrained parameter": (freeze_norm, OPTIMIZER),
    "halved MLP gradient": (halve_gradient, OPTIMIZER),
}
ARMS = {"unchanged": (lambda _: None, OPTIMIZER), "rounding": (perturb_weights, OPTIMIZER), **FAULTS}


@pytest.mark.slow
def test_step_overhead_gate_passes_rounding_and_detects_every_fault() -> None:
    def on_rank(rank: int) -> dict[str, str]:
        bare = Arm(step_overhead.bare(*step_overhead.start_of(*TINY)))
        bare.turn(GATED_STEPS)
        verdicts = {}
        for name, (plant, config) in ARMS.items():
            model, batches = step_overhead.start_of(*TINY)
            plant(model)
            arm = Arm(step_overhead.ours(model, batches, config))
            arm.turn(GATED_STEPS)
            verdicts[name] = step_overhead.row("tiny", name, arm, bare)
        return verdicts

    (verdicts,) = run_ranks(1, on_rank)
    print("\n".join(verdicts.values()))
    assert {name for name, line in verdicts.items() if "void" in line} == set(FAULTS), verdicts


def growing_curve(steps: int, at_100: float = 2e-6, at_200: float = 1.2e-3) -> list[float]:
    """Return a curve that departs from a constant 2.0 as fast as rounding errors were measured to grow."""
    return [2.0 * (1 + at_100 * (at_200 / at_100) ** (step / 100 - 1)) for step in range(steps)]


def test_gates_pass_rounding_errors_that_grew_over_many_steps() -> None:
    """Two runs of equal programs were measured 2e-6 apart at step 100 and 1.2e-3 apart at step 200."""
    plain = [2.0] * 200
    assert gated_difference(growing_curve(200), plain) < FLOAT32_BOUND
    ours, theirs = Arm(None, [1.0], growing_curve(200)), Arm(None, [1.0], plain)  # type: ignore[arg-type]
    assert "void" not in step_overhead.row("any", "ours", ours, theirs)
    assert Curve(growing_curve(200), plain).gated(Curve(plain, plain)) < BOUNDS["float32"]
    assert comparison.worst_difference(growing_curve(200), plain) < comparison.BOUNDS["float32"].loss


@pytest.mark.parametrize("curve", [[*[2.0] * 199, math.nan], [2.0] * 199, [2.0, 2.01, *[2.0] * 198]])
def test_gates_detect_nan_a_short_curve_and_an_early_difference(curve: list[float]) -> None:
    assert gated_difference(curve, [2.0] * 200) > FLOAT32_BOUND
    assert comparison.worst_difference(curve, [2.0] * 200) > comparison.BOUNDS["float32"].loss
    assert Curve([2.0] * 200, curve).gated(Curve([2.0] * 200, [2.0] * 200)) > BOUNDS["float32"]


@pytest.mark.skipif(os.environ.get("MESHBOOK_TORTURE") != "1", reason="make torture: trains four models")
def test_pretrain_curve_gate_passes_rounding_and_detects_every_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the plain loop with itself: from perturbed weights, and with slightly wrong hyperparameters."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(400)))
    options = Namespace(text=text, steps=25, rows=2, seq_len=32, dtype="float32")
    pretrain_curve.write_model(tmp_path)
    plain = pretrain_curve.loop(options, tmp_path / "model")
    found = {}
    for constant, value in (("LR", 1.01e-3), ("DECAY", 0.0)):
        with monkeypatch.context() as patched:
            patched.setattr(pretrain_curve, constant, value)
            found[constant] = pretrain_curve.loop(options, tmp_path / "model").gated(plain)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    perturb_weights(model)
    model.save_pretrained(tmp_path / "perturbed")
    rounding = pretrain_curve.loop(options, tmp_path / "perturbed").gated(plain)
    print(f"rounding {rounding:.1e}, faults {found}")
    assert rounding < BOUNDS["float32"] / 5
    assert min(found.values()) > BOUNDS["float32"]
