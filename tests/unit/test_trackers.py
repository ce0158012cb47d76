"""Trackers: a failing one stops neither the run nor the others, and a resumed run continues what each one stored."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.config.rules import tracker_problems
from components.config.schema.run import (
    LoggingConfig,
    MlflowConfig,
    TrackioConfig,
    WandbConfig,
    WandbMode,
    trackers_without_group,
)
from components.observability import Reporter
from components.observability.trackers import TrackedRun, WandbTracker, enabled_trackers


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
