"""What the reporter prints and writes, the work lost by restarts, and trackers that fail or continue a run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.config.rules import tracker_problems
from components.config.schema.run import (
    LoggingConfig,
    MlflowConfig,
    TrackioConfig,
    WandbConfig,
    WandbMode,
    trackers_without_group,
)
from components.config.stored_run import MetricsLog
from components.observability import Reporter, Result, peak_memory_bytes, peak_reserved_bytes, render_model_card
from components.observability import result as lost_work_module
from components.observability.result import LostWork, lost_work, record_first_step, record_start, summary
from components.observability.trackers import TrackedRun, WandbTracker, enabled_trackers
from components.protocol.run_files import read_json
from components.training import StepMetrics


def test_skipped_update_is_printed_at_steps_that_are_not_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True)
    for step in range(1, 5):
        skipped = step in (3, 4)
        values = {"loss": 1.0, "grad_norm": 1.0, "tokens": 10, "seconds": 1.0, "preempt": False, "interrupt": False}
        report.step(StepMetrics(step=step, skipped=skipped, must_save=False, **values), lr=1.0, tokens=10, every=4)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed if "update skipped" in line] == ["3", "4"]


DPO = {"margin": -0.0004725, "accuracy": 0.75, "reward_chosen": -0.00038, "reward_rejected": -0.00086}


@pytest.mark.parametrize(
    ("others", "shown"), [({}, ["grad_norm", "lr"]), (DPO, ["margin", "accuracy"]), ({"divergence": 4.4e-05}, [])]
)
def test_lines_of_metrics_fit_80_columns(
    others: dict[str, float],
    shown: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not fit is in metrics.jsonl only, and the same in every line; small losses keep their digits."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report = Reporter(LoggingConfig(plot=False, progress=False), str(tmp_path), enabled=True, total_steps=2)
    values = {"grad_norm": 13.83, "seconds": 1.0, "preempt": False, "interrupt": False, "must_save": False}
    for step, loss in ((1, 0.0003318), (2, 0.0003017)):
        metrics = StepMetrics(step=step, skipped=False, tokens=2541, loss=loss, others=others, **values)
        report.step(metrics, lr=2e-7, tokens=2541)
    report.evaluation(step=2, eval_loss=4.409e-05, count=127, unit="pair", metrics=others)
    report.print("word " * 30 + "/a/path/" + "x" * 90)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == ["/a/path/" + "x" * 90]
    assert [line.split()[2:4] for line in lines[:3]] == [
        ["loss", "0.0003318"], ["loss", "0.0003017"], ["eval_loss", "4.409e-05"]
    ]  # fmt: skip
    first, second = (line.split()[0::2] for line in lines[:2])
    assert first == second
    assert {"tokens/s", *shown} <= set(first), first
    assert ("over 127 held-out pairs" in lines[2]) == ("divergence" not in others)
    assert report.read()[-1].items() >= {f"eval_{name}": value for name, value in others.items()}.items()


def test_reward_takes_the_place_of_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True, total_steps=2)
    values = {"loss": 0.0, "grad_norm": 0.5, "tokens": 100, "seconds": 1.0, "preempt": False, "interrupt": False}
    others = {"zero_groups": 0.0, "reward": -2.0}
    report.evaluation(step=0, eval_loss=math.nan, count=64, unit="answer", metrics={"cut": 0.5}, eval_reward=0.03125)
    for step, reward in ((1, 0.1234), (2, None)):  # an objective's own metric of this name is a metric
        metrics = StepMetrics(step=step, skipped=False, must_save=False, others=others if reward is None else
                              {"zero_groups": 0.0}, reward=reward, **values)  # fmt: skip
        report.step(metrics, lr=1.0, tokens=100)
    report.evaluation(step=2, eval_loss=math.nan, count=0, unit="answer")
    first, one, two, stopped = capsys.readouterr().out.splitlines()
    assert first == "step      0  eval_reward 0.0312  eval_cut 0.5  over 64 held-out answers"
    assert one.startswith("step      1  reward 0.1234  grad_norm 0.5")
    assert ("zero_groups 0" in one, "loss" in one) == (True, False)
    assert two.startswith("step      2  loss 0.0000  ")
    assert stopped == "step      2  no evaluation: it was stopped, or the samples have no answers"
    evaluated, step, other = report.read()
    assert evaluated == {"step": 0, "eval_reward": 0.03125, "eval_cut": 0.5}
    assert (step["reward"], step["loss"], other["reward"]) == (0.1234, 0.0, -2.0)


def test_evaluation_of_rewards_is_not_logged_twice_after_a_resume(tmp_path: Path) -> None:
    report = Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True)
    for step, name in ((0, "eval_reward"), (1, "loss"), (1, "eval_reward"), (2, "loss")):
        report._metrics.append({"step": step, name: 0.5})
    report.continue_from(1)
    assert [line["step"] for line in report.read()] == [0, 1]


def test_result_with_task_scores_that_are_not_numbers_is_written(tmp_path: Path) -> None:
    tasks = {"a/acc": math.nan, "b": 0.5}
    result = Result(status="ok", steps=1, mesh="1", processes=1, wall_seconds=2.0, peak_memory_bytes=1, tasks=tasks)
    Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True).finish(result)
    assert read_json(tmp_path / "result.json")["tasks"] == {"a/acc": None, "b": 0.5, "nonfinite": {"a/acc": "nan"}}


@pytest.mark.parametrize(("processes", "is_kept"), [(8, True), (4, False)])
def test_estimates_of_the_launcher_are_those_of_the_same_number_of_processes(
    processes: int, is_kept: bool, tmp_path: Path
) -> None:
    planned = {"gpu": "h100_80", "processes": 8, "step_seconds": 0.5}
    (tmp_path / "environment.json").write_text(json.dumps({"planned": planned}))
    result = Result(status="ok", steps=1, mesh="1", processes=processes, wall_seconds=2.0, peak_memory_bytes=1)
    Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True).finish(result)
    assert read_json(tmp_path / "result.json")["planned"] == (planned if is_kept else None)


def test_peak_memory_is_reported_as_allocated_and_reserved_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved memory is what runs out: torch's caching allocator holds more than is allocated."""
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    values = {"status": "ok", "steps": 1, "mesh": "1", "processes": 1, "wall_seconds": 2.0}
    summaries = {}
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        peaks = {"peak_memory_bytes": peak_memory_bytes(device), "peak_reserved_bytes": peak_reserved_bytes(device)}
        summaries[kind] = summary(Result(**values, **peaks), Path("run"))
    assert "peak memory " in summaries["cpu"]
    assert "reserved" not in summaries["cpu"]
    assert "peak memory 1.00 GiB allocated, 3.00 GiB reserved\n" in summaries["cuda"]


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (
            "teacher: {path: big, revision: v1, stored: null}\ndata: {kind: sft}\n"
            "objective: {kind: distillation, temperature: 2.0, cross_entropy_weight: 0.0}\n",
            ["teacher | big at revision v1", "objective | distillation, temperature 2.0", "target tokens | 90",
             "loss | 0.0003318 in the first step, 12.5000 in the last", "batch | 4 sequences per step, up to 8 tokens"],
        ),
        ("teacher: {path: null, stored: run}\n", ["teacher | its most likely tokens, stored in run"]),
        (
            "objective: {kind: reward, center_weight: 0.0}\ndata: {kind: preferences, chosen_column: null}\n",
            ["objective | reward", "input tokens | 90", "batch | 4 pairs per step, up to 8 tokens per answer"],
        ),
        ("objective: {kind: kto}\ndata: {chosen_column: null}\n", ["batch | 4 answers per step, up to 8"]),
    ],
)  # fmt: skip
def test_model_card_names_teacher_objective_and_units(config: str, rows: list[str], tmp_path: Path) -> None:
    sizes = "training: {global_batch_size: 4, seq_len: 8}\n"
    (tmp_path / "config.yaml").write_text(config + sizes)
    state = {"step": 3, "tokens": 90, "first_loss": 0.0003318, "last_loss": 12.5}
    card = render_model_card(tmp_path, state, "1")
    assert [row for row in rows if f"| {row}" not in card] == []


@pytest.mark.parametrize("is_kto", [False, True])
def test_model_card_has_rewards_in_place_of_losses(is_kto: bool, tmp_path: Path) -> None:
    """Of the evaluations up to the step of the weights; the loss of a run with rewards means nothing."""
    sizes = "training: {global_batch_size: 4, seq_len: 8}\n"
    (tmp_path / "config.yaml").write_text(sizes + ("objective: {kind: kto}\n" if is_kto else "rollouts: {group: 2}\n"))
    log = MetricsLog(tmp_path)
    for step, reward in ((0, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)):
        log.append({"step": step, **({"eval_loss": 2.0} if is_kto else {}), "eval_reward": reward})
    state = {"step": 3, "first_loss": 0.0, "last_loss": -1.5}
    card = render_model_card(tmp_path, state | ({} if is_kto else {"first_reward": 0.03125, "last_reward": 0.9}), "1")
    if is_kto:
        rows = ["| loss | 0.0000 in", "| held-out loss | 2.0000 after 0 steps, 2.0000 after 3 steps |"]
    else:
        rows = ["| reward | 0.03125 in the first step, 0.9000 in the last |",
                "| held-out reward | 0.2500 after 0 steps, 0.7500 after 3 steps |"]  # fmt: skip
    assert [row for row in rows if row not in card] == []
    assert ("loss" in card, "reward" in card) == (is_kto, not is_kto)
    assert "| batch | 4 answers per step, up to 8 tokens each |" in card


def test_summary_names_what_was_done_and_counted() -> None:
    values = {"status": "ok", "mesh": "1", "processes": 1, "wall_seconds": 2.0, "peak_memory_bytes": 1}
    evaluated = summary(Result(steps=12, eval_loss=1.5, **values), Path("run"))
    assert evaluated.startswith("ok: evaluated step 12 on 1 process in 2 s\n")
    hub = summary(Result(steps=0, eval_loss=1.5, **values), Path("run"))
    assert hub.startswith("ok: evaluated on 1 process in 2 s\n")
    assert summary(Result(steps=0, **values), Path("run")).startswith("ok: 1 process in 2 s\n")
    losses = {"first_loss": 0.0003318, "last_loss": 5.0668e-05, "tokens_per_second": 900.0, "counted_tokens": "input"}
    trained = summary(Result(steps=3, **losses, **values), Path("run"))
    assert trained.startswith("ok: 3 steps on 1 process in 2 s\n  loss 0.000332 to 5.07e-05\n")
    assert "  900 input tokens/s\n" in trained


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ({"first_reward": 0.03125, "last_reward": 1.0, "first_eval_reward": 0.04, "eval_reward": 0.98},
         ["reward 0.031 to 1.000", "held-out reward 0.040 to 0.980", "900 answer tokens/s with sampling"]),
        ({"first_reward": -1.0, "last_reward": 0.0},
         ["reward -1.000 to 0.000", "900 answer tokens/s with sampling"]),
        ({"eval_reward": 0.5}, ["loss 0.000 to -0.006", "held-out reward 0.500", "900 target tokens/s"]),
        ({}, ["loss 0.000 to -0.006", "900 target tokens/s"]),
    ],
)  # fmt: skip
def test_summary_of_a_run_with_rewards_has_no_loss(rewards: dict[str, float], shown: list[str]) -> None:
    values = {"status": "ok", "mesh": "1", "processes": 1, "wall_seconds": 2.0, "peak_memory_bytes": 1, "steps": 3}
    result = Result(first_loss=0.0, last_loss=-0.006, tokens_per_second=900.0, **values, **rewards)
    first, *parts, _, _ = summary(result, Path("run")).splitlines()
    assert first == "ok: 3 steps on 1 process in 2 s"
    assert [part.strip() for part in parts] == shown
    evaluated = Result(**values | {"steps": 0}, eval_reward=0.5)
    assert summary(evaluated, Path("run")).startswith("ok: evaluated on 1 process in 2 s\n  held-out reward 0.500\n")


@pytest.mark.parametrize(
    ("starts", "lost"),
    [
        # time of the start and of the first step, lost steps, and when the checkpoint was saved
        ([(100, 105, 0, None), (130, 140, 7, 120.0), (150, 158, 3, 120.0), (210, 214, 1, 200.0)],
         LostWork(restarts=3, steps=11, seconds=(158 - 120) + (214 - 200))),
        ([(100, 120, 0, None), (120, 140, 5, None)], LostWork(restarts=1, steps=5, seconds=40.0)),
        ([(100, 105, 0, None)], LostWork()),
    ],
    ids=["from the same checkpoint", "without a checkpoint", "no restart"],
)  # fmt: skip
def test_restarts_count_the_time_since_their_checkpoint_once(
    starts: list[tuple[int, int, int, float | None]], lost: LostWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(lost_work_module.time, "time", lambda: now)
    for attempt, (began, first_step, lost_steps, saved) in enumerate(starts):
        (tmp_path / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        now = began
        record_start(tmp_path, attempt, lost_steps, saved)
        now = first_step
        record_first_step(tmp_path, attempt)
    assert lost_work(tmp_path) == lost


class FakeTracker:
    """Tracker that stores its calls, and fails in the method `fails_in`."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[Any] = []
        self.fails_in = fails_in

    def start(self, run: TrackedRun) -> None:
        self._call("start", run.directory.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call("log", step, dict(values))

    def finish(self, *, failed: bool) -> None:
        self._call("finish", failed)

    def _call(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        if method == self.fails_in:
            raise ConnectionError(f"{method}: no answer from https://me:hunter2@tracker.example/api")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_failing_tracker_is_reported_once_and_stops_neither_run_nor_others(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = FakeTracker(method), FakeTracker()
    monkeypatch.setattr("components.observability.reporter.enabled_trackers", lambda _: {"bad": bad, "good": good})
    with Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True) as report:
        for step in (1, 2):
            report.evaluation(step=step, eval_loss=2.0, count=3)
    logged = [("log", step, {"eval_loss": 2.0}) for step in (1, 2)]
    assert good.calls == [("start", tmp_path.name), *logged, ("finish", False)]
    assert bad.calls == good.calls[: [call[0] for call in good.calls].index(method) + 1]
    assert len(lines(tmp_path)) == 2
    printed = capsys.readouterr().out
    assert printed.count("bad failed and is off for the rest of the run: ConnectionError") == 1
    assert "hunter2" not in printed
    assert "://me:***@tracker.example/api" in printed


def test_other_ranks_start_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = FakeTracker()
    monkeypatch.setattr("components.observability.reporter.enabled_trackers", lambda _: {"used": used})
    with Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=False) as report:
        report.evaluation(step=1, eval_loss=2.0, count=3)
    assert used.calls == []


def test_every_enabled_tracker_is_used_and_none_by_default() -> None:
    config = LoggingConfig(tensorboard=True, mlflow=MlflowConfig(enabled=True))
    assert list(enabled_trackers(config)) == ["TensorBoard", "MLflow"]
    assert enabled_trackers(LoggingConfig()) == {}


def test_repeated_steps_are_not_logged_again(tmp_path: Path) -> None:
    report = Reporter(LoggingConfig(plot=False), str(tmp_path), enabled=True)
    report.evaluation(step=4, eval_loss=2.0, count=3)
    run = TrackedRun.read(str(tmp_path))
    assert run.unlogged(4, {"eval_loss": 2.0, "loss": 1.0}) == {"loss": 1.0}
    assert run.unlogged(5, {"eval_loss": 1.5}) == {"eval_loss": 1.5}


def test_run_goes_on_after_the_store_of_mlflow_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="the extra `dev` is not installed; make install-dev installs it")
    pytest.importorskip("mlflow", reason="the extra `dev` is not installed; make install-dev installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the defaults for MLflow end with this test
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = LoggingConfig(plot=False, tensorboard=True, mlflow=MlflowConfig(enabled=True))
    (tmp_path / "run").mkdir()
    with Reporter(config, str(tmp_path / "run"), enabled=True) as report:
        report.evaluation(step=0, eval_loss=2.0, count=3)
        assert len(list((tmp_path / "run" / "mlruns").rglob("metrics/eval_loss"))) == 1
        shutil.rmtree(tmp_path / "run" / "mlruns")
        for step in (1, 2):
            report.evaluation(step=step, eval_loss=2.0, count=3)
    assert capsys.readouterr().out.count("MLflow failed and is off for the rest of the run: ") == 1
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("eval_loss")] == [0, 1, 2]


def test_wandb_run_has_an_id_of_its_own_that_a_resume_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra `dev` is not installed; make install-dev installs it")
    ids: list[str] = []
    monkeypatch.setattr(
        wandb, "init", lambda **settings: ids.append(settings["id"]) or SimpleNamespace(dir="w/files")
    )  # real: seconds
    for name in ("a/mine", "b/mine", "b/x:y#1", "a/mine"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        WandbTracker(WandbConfig(mode=WandbMode.offline)).start(TrackedRun(tmp_path / name))
    assert ids[0] == ids[3]
    assert len(set(ids)) == 3
    assert ids[2].startswith("x-y-1-")


@pytest.mark.parametrize(
    ("package", "config"),
    [
        ("wandb", LoggingConfig(wandb=WandbConfig(mode=WandbMode.offline))),
        ("tensorboard", LoggingConfig(tensorboard=True)),
        ("mlflow", LoggingConfig(mlflow=MlflowConfig(enabled=True))),
        ("trackio", LoggingConfig(trackio=TrackioConfig(enabled=True))),
    ],
)
def test_package_of_each_tracker_must_be_installed(
    package: str, config: LoggingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else name)
    (problem,) = tracker_problems(config)
    assert f": {package} is not installed; run pip install " in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert tracker_problems(config) == []


def test_sweep_sets_the_group_of_enabled_trackers_that_have_none() -> None:
    both = LoggingConfig(tensorboard=True, wandb=WandbConfig(mode=WandbMode.offline), mlflow=MlflowConfig(enabled=True))
    assert trackers_without_group(both) == ["logging.wandb", "logging.mlflow"]
    both.wandb.group = "mine"
    both.trackio.enabled = True
    assert trackers_without_group(both) == ["logging.mlflow", "logging.trackio"]
    assert trackers_without_group(LoggingConfig()) == []
