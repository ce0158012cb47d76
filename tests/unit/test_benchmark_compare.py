"""Arithmetic of scripts/benchmark/compare.py, against numbers computed by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.training.step_cost import model_flops
from scripts.benchmark.compare import parse
from scripts.benchmark.compare_report import Arm, Report, Turn, ratio, why_void, worst_difference
from scripts.benchmark.peers.make import config_of
from scripts.benchmark.peers.workload import Shape, Workload

SHAPE = Shape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, vocabulary=10)
ADAMW = {
    "parameters": 7,
    "dtypes": ["float32"],
    "lr": [0.1],
    "betas": [[0.9, 0.95]],
    "eps": [1e-8],
    "weight_decay": [0.0],
}


def turn(cost: float, losses: list[float], targets: int = 100, **settings: Any) -> Turn:
    return Turn(
        losses=losses,
        seconds=cost,
        processor_seconds=cost,
        memory={"resident": cost},
        settings={**ADAMW, **settings},
        versions={"torch": "9"},
        cost=cost,
        targets=targets,
        flops=2e12,
    )


def arm(name: str, *costs: float, losses: tuple[float, ...] = (2.0, 1.0), targets: int = 100) -> Arm:
    return Arm(name, [turn(cost, list(losses), targets) for cost in costs])


def workload(folder: Path, **values: Any) -> Workload:
    fixed = {"device": "cpu", "precision": "float32", "layout": "rows", "shape": SHAPE, "lr": 0.1}
    return Workload(
        folder=str(folder), **{**fixed, "seq_len": 5, "rows": 2, "micro": 2, "warmup": 1, "steps": 2, **values}
    )


def test_ratio_is_the_median_over_paired_turns() -> None:
    ours, theirs = arm("meshbook", 1.0, 2.0, 4.0), arm("loop", 2.0, 3.0, 4.0)
    assert ratio(ours.turns, theirs.turns) == 1.5  # median of 2, 1.5 and 1
    fewer = arm("padded", 2.0, 3.0, 4.0, targets=50)  # half as many targets in the same time
    assert ratio(ours.turns, fewer.turns) == 3.0  # median of 4, 3 and 2
    assert ours.speed == 50.0
    assert ours.tflops == 1.0
    assert ours.memory == {"resident": 4.0}


def test_worst_difference_compares_losses_step_by_step() -> None:
    assert worst_difference([2.0, 1.25], [2.0, 1.0]) == 0.25
    assert worst_difference([2.0, 3.0], [4.0, 3.0]) == 0.5
    assert worst_difference([2.0, math.nan], [2.0, 1.0]) == math.inf
    assert worst_difference([2.0], [2.0, 1.0]) == math.inf


def test_arm_with_different_training_is_void() -> None:
    reference = turn(1.0, [2.0, 1.0])
    good = turn(1.0, [2.0, 1.00005])
    assert why_void([good], reference, 1e-4, "float32") == ""
    assert why_void([good, turn(1.0, [2.0, 1.01])], reference, 1e-4) == "losses differ by 1.0e-02, more than 1e-04"
    assert why_void([turn(1.0, [2.0, 1.0], lr=[0.2])], reference, 1e-4) == "lr [0.2], not [0.1]"
    assert why_void([turn(1.0, [2.0, 1.0], parameters=6)], reference, 1e-4) == "parameters 6, not 7"
    half = turn(1.0, [2.0, 1.0], dtypes=["bfloat16"])
    assert why_void([half], reference, 1e-4, "float32") == "dtypes ['bfloat16'], not ['float32']"
    assert why_void([half], reference, 1e-4) == ""


def test_report_lists_void_arms_and_returns_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = [
        arm("loop", 2.0, 2.0),
        arm("meshbook", 1.0, 4.0),
        arm("wrong", 0.5, 0.5, losses=(2.0, 1.5)),
        Arm("absent", reason="no such package"),
    ]
    report = Report("the command", workload(tmp_path), turn(1.0, [2.0, 1.0]), 1e-4, arms, [2.0, 4.0, 8.0], ["a note"])
    assert report.finish(tmp_path) == 1  # an arm is void
    # meshbook: 100 and 25 targets/s, 75 apart; 2 and 0.5 TFLOP/s of a peak of 4; the loop's ratios are 2 and 0.5.
    assert [report.cells(each) for each in report.ranked()] == [
        ["meshbook", "62", "120%", "1.00", "31%", "4.00", "0.0e+00", "ok"],
        ["loop", "50", "0%", "1.25", "25%", "2.00", "0.0e+00", "ok"],
        ["wrong", "200", "0%", "", "", "0.50", "5.0e-01", "VOID: losses differ by 5.0e-01, more than 1e-04"],
        ["absent", "", "", "", "", "", "", "not measured: no such package"],
    ]
    assert "| loop | 50 | 0% | 1.25 | 25% | 2.00 | 0.0e+00 | ok |" in (tmp_path / "compare.md").read_text()
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [(row["arm"], row["round"]) for row in rows[:2]] == [("meshbook", "1"), ("meshbook", "2")]
    assert rows[-1]["verdict"] == "no such package"
    assert "a note" in capsys.readouterr().out
    arms.pop(2)
    assert report.finish(tmp_path) == 0
    arms[1].add("exit status 1: it failed")
    assert report.finish(tmp_path) == 1  # the meshbook arm was not measured


def test_flops_of_a_shape_match_hand_computation_and_model_flops() -> None:
    # Weights of a layer: 64 + 32 + 32 + 64 + 3 x 128 = 576; of two layers and the head: 1,232.
    # Query-key pairs: 6 + 3, at 12 x 2 layers x 2 heads x 4 each.
    assert SHAPE.flops([3, 2]) == 6 * 1232 * 5 + 192 * 9
    # LoRA adapters of rank 2: input plus output sizes of the linear layers are 128 per decoder layer.
    assert SHAPE.flops([3, 2], lora_rank=2) == (4 * 1232 + 6 * 512) * 5 + 192 * 9
    config = dict(config_of(SHAPE))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    assert model_flops(model).of([3, 2]) == SHAPE.flops([3, 2])


def test_packed_and_padded_micro_batches_contain_the_same_documents(tmp_path: Path) -> None:
    """Documents of 3, 2 and 4 tokens: the first two in row 0, the third in row 1."""
    arrays = {"ids": np.arange(1, 10), "ends": np.array([3, 5, 9]), "row_documents": np.array([0, 1, 2])}
    arrays |= {"labels": np.array([-100, 2, 3, -100, 5, -100, 7, 8, 9]), "row_starts": np.array([0, 2, 3])}
    np.savez(tmp_path / "tokens.npz", **arrays)
    packed = workload(tmp_path, layout="packed").micro_batch(0, 0)
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    assert packed["labels"].tolist() == [[-100, 2, 3, -100, 5], [-100, 7, 8, 9, -100]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    padded = workload(tmp_path, layout="padded")
    assert padded.micro_batch(0, 0)["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert (padded.targets(0), padded.lengths(0)) == (6, [3, 2, 4])
    padded.write(tmp_path / "workload.json")
    assert Workload.read(tmp_path / "workload.json") == padded


def test_invalid_options_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(
        ["sft_packed_vs_padded", "--arms", "meshbook,trainer", "--device", "cpu", "--", "model.compile=true"]
    )
    assert options.arms == ["meshbook", "trainer_packed", "trainer_padded"]
    assert (options.size, options.overrides) == ("tiny", ("model.compile=true",))
    assert parse(["lora", "--device", "cuda"]).size == "8b"
    with pytest.raises(SystemExit):
        parse(["lora", "--arms", "litgpt"])
    assert "lora has no litgpt; it has meshbook, loop, trainer, torchtune" in capsys.readouterr().err
