"""scripts/benchmark and benchmark tasks, against numbers computed by hand and runs played event by event."""

from __future__ import annotations

import csv
import math
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.config.schema.data import IGNORED
from components.config.schema.training import EvaluationConfig, TrainingTasksConfig
from components.data.batches import Padding
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.training.evaluation import RequestBatches, SignedLogProbability
from components.training.harness import BenchmarkTasks, _check_names, _check_task, _scores, load_tasks
from components.training.step_cost import model_flops
from scripts.benchmark.compare import parse
from scripts.benchmark.compare_report import Arm, Report, Turn, ratio, why_void, worst_difference
from scripts.benchmark.fleet import Times, best_interval, goodput, simulated_goodput
from scripts.benchmark.loss_memory import METHODS, OBJECTIVES, make_inputs
from scripts.benchmark.peers.make import config_of
from scripts.benchmark.peers.workload import Shape, Workload

SHAPE = Shape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, vocabulary=10)
GROUP = {"lr": [0.1], "betas": [[0.9, 0.95]], "eps": [1e-8], "weight_decay": [0.0]}
ADAMW = {"parameters": 7, "dtypes": ["float32"], **GROUP}


def turn(cost: float, losses: list[float], targets: int = 100, **settings: Any) -> Turn:
    values = {"memory": {"resident": cost}, "settings": {**ADAMW, **settings}, "versions": {"torch": "9"}}
    return Turn(losses=losses, seconds=cost, processor_seconds=cost, cost=cost, targets=targets, flops=2e12, **values)


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


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark" / "fleet.py"
RUNS = [Times(3600, 10, 60, 300), Times(600, 30, 0, 100), Times(86_400, 0.5, 20, 600)]


def played(interval: float, times: Times, failures: int) -> float:
    """Play a run: train, save, train on while the checkpoint is completed, fail, restart from the last complete one."""
    rng = random.Random(1)
    kept = total = 0.0
    for _ in range(failures):
        failure, clock = rng.expovariate(1 / times.failures), times.restart
        while clock + interval + times.blocked + times.background <= failure:
            clock += interval + times.blocked
            kept += interval
        total += failure
    return kept / total


@pytest.mark.parametrize("times", RUNS)
@pytest.mark.parametrize("interval", [60.0, 600.0])
def test_goodput_is_that_of_a_run_played_event_by_event(times: Times, interval: float) -> None:
    expected = goodput(interval, times)
    assert played(interval, times, 20_000) == pytest.approx(expected, rel=0.03)
    assert simulated_goodput(interval, times, 100_000, seed=0) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("times", RUNS)
def test_no_other_interval_is_better_than_the_best(times: Times) -> None:
    best = best_interval(times)
    assert best == pytest.approx((2 * times.blocked * times.failures) ** 0.5, rel=0.25)  # Young's first-order formula
    assert all(goodput(best, times) >= goodput(best * factor, times) for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 10))


def test_frequent_failures_do_not_overflow() -> None:
    assert goodput(1e6, Times(1, 1e6, 0, 0)) == 0
    assert best_interval(Times(1, 1e6, 0, 0)) == pytest.approx(1)


def test_table_has_a_row_per_world() -> None:
    command = [sys.executable, str(SCRIPT), "goodput", "--worlds", "8", "16384", "--failures", "1000"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(" | ")[0] for line in printed[2:]] == ["| 8", "| 16,384"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["goodput", "--mtbf-hours", "0"], "--mtbf-hours: 0: must be a number above 0"),
        (["goodput", "--blocked-seconds", "soon"], "--blocked-seconds: soon: must be a number of at least 0"),
        (["costs", "--worlds", "100"], "--worlds: 100: must be a power of two of at least 4"),
    ],
)
def test_invalid_options_are_rejected_with_the_rule(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: argument {message}" in done.stderr


LENGTHS = [3, 9, 30, 1, 9, 7, 2, 8, 8, 5, 1]


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [None, 1, 4])
def test_every_request_counts_once_in_passes_of_one_shape_on_all_ranks(dp: int, rows: int | None) -> None:
    padding = Padding(multiple=4, limit=32)
    ranks = [
        RequestBatches(dp_rank=rank, dp_size=dp, padding=padding, tokens=24, rows=rows).split(LENGTHS)
        for rank in range(dp)
    ]
    assert len({tuple(each.length for each in passes) for passes in ranks}) == 1
    counted = [index for passes in ranks for each in passes if each.counts for index in each.indices]
    assert sorted(counted) == list(range(len(LENGTHS)))
    lengths = [each.length for each in ranks[0]]
    assert lengths == sorted(lengths, reverse=True)
    for passes in ranks:
        for each in passes:
            assert each.indices
            assert each.length % 4 == 0
            assert all(LENGTHS[index] <= each.length for index in each.indices)
            most = rows or max(1, 24 // each.length)
            assert len(each.indices) <= most


def test_signed_values_give_log_probabilities_and_the_most_likely_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    logits[0, 1, 2:4] = 9.0  # two most likely tokens: the first one counts
    logits[1, 4] = math.nan
    targets = torch.tensor([[3, 2, 0, IGNORED, 6], [1, 5, 4, 2, 2]])
    targets[0, 0], targets[0, 2] = logits[0, 0].argmax(), logits[0, 2].argmax()
    log_probs, is_miss = SignedLogProbability.decode(SignedLogProbability().per_token(logits, targets))
    wanted = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    real = (targets != IGNORED) & ~wanted.isnan()
    torch.testing.assert_close(log_probs[real], wanted[real], rtol=1e-15, atol=0)
    assert log_probs[0, 3] == 0
    assert not is_miss[0, 3]
    assert is_miss[1, 4]  # of NaN logits no token is the most likely one
    assert is_miss[real].tolist() == (logits.argmax(-1) != targets)[real].tolist()
    targets[0, 1] = 3
    assert SignedLogProbability.decode(SignedLogProbability().per_token(logits, targets))[1][0, 1]
    with pytest.raises(TypeError, match="per token only"):
        SignedLogProbability().of_logits(logits, targets)


def task(**values: Any) -> Any:
    options = values.pop("options", {})
    return SimpleNamespace(**{"OUTPUT_TYPE": "loglikelihood", **values}, get_config=lambda name: options)


def test_unknown_and_unsupported_tasks_are_rejected_by_name() -> None:
    pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed; make install-dev installs it")
    cfg = EvaluationConfig(tasks=["pick", "hellaswg"])
    with pytest.raises(ConfigError, match=r"'hellaswg' is neither a task, .*; did you mean hellaswag\?"):
        _check_names(cfg, ["pick", "hellaswag"])
    with pytest.raises(ConfigError, match="'hellaswg' is neither a task, .*; lm-eval ls tasks lists the names"):
        _check_names(cfg, ["pick"])
    _check_names(cfg, ["pick", "hellaswg"])
    rejected = {
        "runs code that the model writes": task(UNSAFE_CODE=True),
        "has images or audio": task(MULTIMODAL=True),
        r"sets generation_kwargs \['num_beams'\]": task(
            OUTPUT_TYPE="generate_until", options={"num_beams": 4, "until": ["x"]}
        ),
    }
    for why, each in rejected.items():
        with pytest.raises(ConfigError, match=f"evaluation.tasks: odd {why}, which is not supported here; remove it"):
            _check_task("odd", each)
    _check_task("plain", task(OUTPUT_TYPE="generate_until", options={"until": ["x"], "do_sample": False}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="apply_chat_template=true: the tokenizer has no chat template"):
        load_tasks(EvaluationConfig(tasks=["pick"], apply_chat_template=True), tokenizer)


def test_scores_are_named_by_task_metric_and_filter() -> None:
    values = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict-match": 1, "sample_len": 3}
    results = {
        "results": {"sub": values, "all": {"acc,none": 0.25, "acc_stderr,none": 0.1}},
        "group_subtasks": {"all": ["sub"]},
        "n-samples": {"sub": {"original": 9, "effective": 3}},
    }
    scores = _scores(results)
    assert scores.metrics == {"sub/acc": 0.5, "sub/exact_match/strict-match": 1.0, "all/acc": 0.25}
    assert scores.documents == {"all": None}


def test_tasks_are_due_every_n_steps_but_not_at_the_last() -> None:
    def due(every: int, loaded: dict[str, Any]) -> list[int]:
        tasks = BenchmarkTasks(TrainingTasksConfig(tasks=["a"], every=every), byte_tokenizer(), loaded)
        run: Any = SimpleNamespace(total_steps=6)
        return [number for number in range(1, 7) if tasks.due(SimpleNamespace(number=number, run=run))]  # type: ignore[arg-type]

    assert due(2, {"tasks": {}}) == [2, 4]
    assert due(0, {"tasks": {}}) == []
    assert due(2, {}) == []


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_methods_have_the_same_gradients(objective: str) -> None:
    options = Namespace(tokens=64, hidden=16, dtype="float64", targets=0.7)
    gradients = []
    for method in METHODS:
        inputs = make_inputs(200, options, torch.device("cpu"))
        OBJECTIVES[objective](inputs, method).backward()
        gradients.append((inputs.hidden.grad, inputs.weight.grad))
    for logits, chunked in zip(*gradients, strict=True):
        assert logits.abs().max() > 1e-6
        torch.testing.assert_close(chunked, logits, rtol=1e-5, atol=1e-9)
