"""Several trackers at once in a real run and its resume, read back with each package's own reader."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.protocol.safe_parsing import load_yaml

ROOT = Path(__file__).resolve().parents[2]
RUN = ("experiment=smoke", "training.seq_len=64", "data.max_samples=64", "data.max_eval_samples=8",
       "cluster.device=cpu", "generation.samples=0", "checkpoint.export=false", "parallelism=single",
       "optimizer.schedule=constant",
       "checkpoint.every=3", "checkpoint.last=false", "training.eval_every=3", "logging.plot=false",
       "run.dir=run", "run.name=tracked", "logging.tensorboard=true", "logging.mlflow.enabled=true",
       "logging.mlflow.group=together", "logging.wandb.mode=offline")  # fmt: skip
HAS_TRACKIO = importlib.util.find_spec("trackio") is not None
Curve = dict[str, dict[int, float]]
"""Metric -> step -> value."""


def start(folder: Path, *overrides: str) -> str:
    trackio = ["logging.trackio.enabled=true"] if HAS_TRACKIO else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MESHBOOK_", "MLFLOW_"))}
    environment.pop("TRACKIO_DIR", None)
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "finetune.py"), *RUN, *trackio, *overrides],
        cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def logged(run_dir: Path) -> Curve:
    """Return the values in metrics.jsonl."""
    curve: Curve = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for key in line.keys() - {"step", "check"}:
            curve.setdefault(key, {})[line["step"]] = line[key]
    return curve


def assert_same(tracked: Curve, run_dir: Path, *, rounded: bool = False) -> None:
    """Compare all curves with metrics.jsonl, except for speeds of steps that ran twice.

    Trackers that cannot remove values keep the evaluation after step 5, which ended the first attempt.
    """
    expected = logged(run_dir)
    assert tracked.keys() == expected.keys()
    for key in expected.keys() - {"tokens_per_second"}:
        curve = {step: value for step, value in tracked[key].items() if (key, step) != ("eval_loss", 5)}
        assert curve == (pytest.approx(expected[key], rel=1e-6) if rounded else expected[key]), key


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of 5 steps that was resumed from its checkpoint of step 3, up to step 6."""
    pytest.importorskip("tensorboard", reason="the extra `dev` is not installed; make install-dev installs it")
    pytest.importorskip("mlflow", reason="the extra `dev` is not installed; make install-dev installs it")
    folder = tmp_path_factory.mktemp("tracked")
    start(folder, "training.max_steps=5")
    output = start(folder, "training.max_steps=6")
    assert "resumed from" in output
    assert "off for the rest of the run" not in output
    assert {each.name for each in folder.iterdir()} == {"run"}  # trackers write nothing elsewhere
    for opened in ("tensorboard --logdir", "mlflow ui --backend-store-uri", "wandb sync"):
        assert f"{opened} {folder}/run/" in output
    assert sorted(logged(folder / "run")["loss"]) == [1, 2, 3, 4, 5, 6]
    return folder


def test_tensorboard_has_the_curves_and_the_config(resumed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resumed / "run" / "tensorboard")).Reload()
    # Without those of steps 4 and 5 of the first attempt, nor its evaluation after step 5.
    assert [each.step for each in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert {each.step for each in events.Scalars("eval_loss")} == {0, 3, 6}
    tags = events.Tags()["scalars"]
    assert_same({tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags}, resumed / "run", rounded=True)
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    config = re.fullmatch(r"```yaml\n(.*)```", text, re.DOTALL)
    assert config is not None
    assert load_yaml(config[1]) == load_yaml((resumed / "run" / "config.yaml").read_text())


def test_mlflow_has_one_run_with_the_curves_and_the_config(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(resumed / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("meshbook")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name, run.data.tags["group"]) == ("FINISHED", "run", "together")
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    assert all(len({each.step for each in history}) == len(history) for history in histories.values())
    curves = {key: {each.step: each.value for each in history} for key, history in histories.items()}
    assert_same(curves, resumed / "run")
    params = run.data.params
    assert (params["optimizer.schedule"], params["training.seq_len"]) == ("constant", "64")
    assert params["run.name"] == "tracked"
    # A parameter cannot change: the resume's value is a tag.
    assert (params["training.max_steps"], run.data.tags["training.max_steps"]) == ("5", "6")


def test_wandb_continues_the_run_under_the_same_id(resumed: Path) -> None:
    stored = sorted((resumed / "run" / "wandb").glob("offline-run-*"))
    assert len(stored) == 2
    run_id = json.loads((resumed / "run" / "trackers.json").read_text())["wandb"]
    assert run_id.startswith("run-")
    assert {folder.name.split("-", 3)[3] for folder in stored} == {run_id}


@pytest.mark.skipif(not HAS_TRACKIO, reason="trackio is not installed")
def test_trackio_has_one_run_with_the_curves_and_the_config(resumed: Path) -> None:
    code = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("meshbook")
logs = SQLiteStorage.get_logs("meshbook", run.name, run_id=run.id)
print(json.dumps([run.name, run.config, logs], default=str))
"""
    environment = os.environ | {"TRACKIO_DIR": str(resumed / "run" / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=resumed, text=True, capture_output=True, check=True
    )
    name, config, logs = json.loads(done.stdout)
    curves: Curve = {}
    for line in logs:
        for key in line.keys() - {"step", "timestamp"}:
            assert line["step"] not in curves.setdefault(key, {})
            curves[key][line["step"]] = line[key]
    assert name == "run"
    assert config["optimizer"]["schedule"] == "constant"
    assert_same(curves, resumed / "run")
    assert all(math.isfinite(value) for value in curves["loss"].values())
