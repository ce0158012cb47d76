"""The Optuna study of a sweep without runs, early stops, plots, and the shares of the machine of parallel points."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_sweep_points import expanded

pytest.importorskip("optuna", reason="needs the extra `optuna`")

from components.config.compose.sweep import SweepRequest, compose_point
from components.config.compose.sweep_keys import EarlyStop, Goal, Range, SweepConfig
from components.config.schema import FinetuneConfig, GrpoConfig
from components.config.stored_run import MetricsLog
from components.launch.sweep import command
from components.launch.sweep import points as shares
from components.launch.sweep.plan import (
    STOPPED_EARLY,
    Point,
    PointRecord,
    StudyPlan,
    Sweep,
    SweepRow,
    read_points,
    write_record,
)
from components.launch.sweep.ranking import losing
from components.launch.sweep.report import report_now
from components.launch.sweep.study import JOURNAL, PointStudy, dimensions_of, space_of
from components.protocol.errors import ConfigError

COMMAND = ("model=tiny", "optimizer.lr=loguniform(1e-5,1e-1)", "training.global_batch_size=8,16", "sweep.trials=12")


def opened(folder: Path, request: SweepRequest, goal: Goal = Goal.min) -> PointStudy:
    plan = StudyPlan(request.keys.trials or 0, request.keys.seed, space_of(request.space), [])
    return PointStudy(folder, plan, request.space, goal)


def loss(values: dict[str, str]) -> float:
    return abs(math.log10(float(values["optimizer.lr"])) + 3)


def finish(study: PointStudy, number: int, state: str = "ok", value: float | None = None) -> None:
    row = SweepRow(Point(number, str(number), study.values[number], []), state)
    row.result = {"eval_loss": loss(study.values[number]) if value is None else value}
    study.record(row, "eval_loss", {1: 5.0})


def run_study(folder: Path, request: SweepRequest, *, reopen: bool) -> list[dict[str, str]]:
    """Run a study of 16 points; with `reopen` in a new process, as it were, for every point."""
    folder.mkdir()
    study = opened(folder, request)
    for number in range(16):
        if reopen:
            study = opened(folder, request)
        assert study.choose() == study.values[number]
        if reopen:
            study = opened(folder, request)
            assert study.unfinished() == [number]
        finish(study, number)
    return study.values


def test_listed_values_and_ends_of_ranges_are_checked() -> None:
    request = expanded(*COMMAND)
    assert [point.overrides for point in request.points] == [
        ("model=tiny", "optimizer.lr=1e-05", "training.global_batch_size=8"),
        ("model=tiny", "optimizer.lr=0.1", "training.global_batch_size=16"),
    ]
    chosen = request.study_point({"optimizer.lr": "0.002", "training.global_batch_size": "16"})
    assert chosen.overrides == ("model=tiny", "optimizer.lr=0.002", "training.global_batch_size=16")
    stored = dimensions_of(space_of(request.space))
    assert [(each.key, each.range) for each in stored] == [(each.key, each.range) for each in request.space]


def test_points_of_whole_number_keys_are_valid(tmp_path: Path) -> None:
    ranges = ("training.max_steps=uniform(10,100)", "training.global_batch_size=loguniform(1,1e3)")
    request = expanded("model=tiny", *ranges, "optimizer.lr=uniform(0,1)", "sweep.trials=12")
    study = opened(tmp_path, request)
    for number in range(12):
        chosen = request.study_point(study.choose() or {})
        assert compose_point(request, chosen, lambda cfg, rejected: [])[0] is not None, chosen
        finish(study, number)
    assert opened(tmp_path, request).values == study.values
    assert dimensions_of(space_of(request.space))[0].range == Range(10, 100, log=False, whole=True)
    assert space_of(request.space)["optimizer.lr"] == {"low": 0, "high": 1, "log": False, "whole": False}


def test_interrupted_study_chooses_the_points_of_one_that_was_not(tmp_path: Path) -> None:
    request = expanded(*COMMAND)
    points = run_study(tmp_path / "a", request, reopen=False)
    assert run_study(tmp_path / "b", request, reopen=True) == points
    assert sum(map(loss, points[10:])) / 6 < sum(map(loss, points[:10])) / 10  # the first 10 are random
    assert run_study(tmp_path / "c", expanded(*COMMAND, "sweep.seed=1"), reopen=False) != points


def test_listed_values_are_not_chosen_twice(tmp_path: Path) -> None:
    study = opened(tmp_path, expanded("run.seed=1,2,3", "parallelism=ddp,fsdp2", "sweep.trials=6"))
    for number in range(6):
        assert study.choose() is not None
        finish(study, number, value=float(number))
    assert len({tuple(values.items()) for values in study.values}) == 6
    assert study.choose() is None
    assert study.unfinished() == []


def test_states_of_points_become_those_of_trials(tmp_path: Path) -> None:
    study = opened(tmp_path, expanded(*COMMAND))
    states = ("ok", "oom", "invalid", "failed", STOPPED_EARLY, "interrupted", "preempted", "running")
    for number, state in enumerate(states):
        study.choose()
        finish(study, number, state)
    study.choose()
    finish(study, 8, "ok", math.nan)
    assert study.unfinished() == [5, 6, 7]
    found = study._study.trials
    expected = ["COMPLETE", "FAIL", "FAIL", "FAIL", "PRUNED", "RUNNING", "RUNNING", "RUNNING", "FAIL"]
    assert [trial.state.name for trial in found] == expected
    assert found[4].intermediate_values == {1: 5.0}
    for number in (0, 3, 4):  # retried
        finish(study, number)
    assert [trial.state.name for trial in study._study.trials[9:]] == ["COMPLETE", "COMPLETE"]
    assert [trial.params for trial in study._study.trials[9:]] == [found[3].params, found[4].params]
    assert len(opened(tmp_path, expanded(*COMMAND)).values) == 9


def test_damaged_journal_is_a_config_error(tmp_path: Path) -> None:
    request = expanded(*COMMAND)
    opened(tmp_path, request).choose()
    file = tmp_path / JOURNAL
    file.write_text("{" + file.read_text())
    with pytest.raises(ConfigError, match=r"optuna.journal: is damaged and cannot be read"):
        opened(tmp_path, request)


def test_missing_optuna_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError) as caught:
        expanded(*COMMAND)
    (problem,) = caught.value.problems
    assert problem.startswith("sweep.trials=12: optuna is not installed; run pip install 'meshbook[optuna]', or set ")


CURVES = [{1: 5.0, 2: value, 4: value - 1} for value in (1.0, 2.0, 3.0, 4.0)]  # the median at step 2 is 2.5


@pytest.mark.parametrize(
    ("curve", "ended", "reason"),
    [
        ({}, 4, ""),
        ({1: 5.0, 2: 2.4}, 4, ""),
        ({1: 5.0, 2: 2.5}, 4, ""),
        ({1: 5.0, 2: 2.6}, 4, "eval_loss is 2.6 at best up to step 2; the median of 4 points there is 2.5"),
        ({1: 5.0, 2: 2.6}, 3, ""),  # too few to compare with
        ({1: 2.0, 2: 9.9}, 4, ""),  # the best value counts
        ({3: 9.0}, 4, ""),  # no point has evaluated at this step
        ({2: math.nan}, 4, "eval_loss is nan at step 2"),
        ({1: 5.0, 2: 4.0, 4: 4.0}, 4, ""),  # the last step
    ],
)
def test_median_rule(curve: dict[int, float], ended: int, reason: str) -> None:
    assert losing(curve, CURVES[:ended], "eval_loss", Goal.min) == reason
    mirrored = [{step: -value for step, value in each.items()} for each in (curve, *CURVES[:ended])]
    assert bool(losing(mirrored[0], mirrored[1:], "score", Goal.max)) is bool(reason)


@pytest.mark.parametrize(
    ("environ", "parallel", "shared"),
    [
        ({}, 1, [{}]),
        ({}, 2, [{"OMP_NUM_THREADS": "2"}] * 2),
        ({"OMP_NUM_THREADS": "3"}, 2, [{}] * 2),
        (
            {"CUDA_VISIBLE_DEVICES": "4, 5,6,7"},
            2,
            [{"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": each} for each in ("4,5", "6,7")],
        ),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6"}, 2, [{"OMP_NUM_THREADS": "2"}] * 2),  # of points on the CPU
    ],
)
def test_points_share_the_machine(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], parallel: int, shared: list[dict[str, str]]
) -> None:
    monkeypatch.setattr(shares, "usable_cores", lambda: 8)
    monkeypatch.setattr(shares, "visible_gpus", lambda given: len(given.get("CUDA_VISIBLE_DEVICES", "").split(",")) % 5)
    if "CUDA_VISIBLE_DEVICES" not in environ:
        monkeypatch.setattr(shares, "visible_gpus", lambda given: 0)
    point = Point(0, "0", {}, [], processes=2)
    assert [shares._share_of(slot, parallel, point, environ) for slot in range(parallel)] == shared
    job = Point(0, "0", {}, [], processes=2, runs_here=False)
    assert shares._share_of(0, parallel, job, environ) == {}


def test_study_and_early_stop_of_runs_with_rewards_need_a_metric_that_they_have() -> None:
    cfg = GrpoConfig(model=None, data=None)  # type: ignore[arg-type]
    (problem,) = command._metric_problems(cfg, SweepConfig(trials=3))
    assert problem == "sweep.metric=eval_loss: runs with rewards have no eval_loss; set sweep.metric=eval_reward"
    cfg.training.eval_every = 0
    found = command._metric_problems(cfg, SweepConfig(early_stop=EarlyStop.median))
    assert [each.split(":")[0] for each in found] == ["sweep.metric=eval_loss", "training.eval_every=0"]
    assert command._metric_problems(cfg, SweepConfig()) == []
    assert command._metric_problems(cfg, SweepConfig(trials=3, metric="eval_reward")) == []
    finetune = FinetuneConfig(model=None, data=None)  # type: ignore[arg-type]
    assert command._metric_problems(finetune, SweepConfig(trials=3)) == []


def test_gpus_must_be_divisible_between_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "visible_gpus", lambda environ: 6)
    cfg = FinetuneConfig(model=None, data=None)  # type: ignore[arg-type]
    assert shares.share_problems(cfg, 2, 3) == []
    assert shares.share_problems(cfg, 1, 4) == [
        "sweep.parallel=4: the points share 6 visible GPUs, which must be divisible by it; set it to one of 1, 2, 3, "
        "6, or change CUDA_VISIBLE_DEVICES"
    ]


def test_plots_of_a_sweep_are_written_next_to_its_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    points = [
        Point(number, str(number), {"optimizer.lr": f"1e-{number}", "a": "bc"[number % 2]}, []) for number in range(4)
    ]
    keys, plan = ["optimizer.lr", "a"], StudyPlan(4, 0, {}, [])
    sweep = Sweep(tmp_path, "id", "finetune", Path("/r.py"), Path("/"), "r.py", [], keys, points, study=plan)
    sweep.write()
    written = []
    for number, status in enumerate(("ok", "preempted", "failed", "ok")):
        run_dir = sweep.run_dir(points[number])
        run_dir.mkdir()
        for step in (0, 10, 20):
            MetricsLog(run_dir).append({"step": step, "eval_loss": 5.0 - number})
        result = {"status": status, "eval_loss": 5.0 - number, "tokens_per_second": 1.0}
        (run_dir / "result.json").write_text(json.dumps(result))
        write_record(sweep, points[number], PointRecord(0.0, 0, stopped_early="loses" if number == 1 else ""))
        report_now(sweep)
        written.append((tmp_path / "sweep.png").exists())
    assert written == [False, True, True, True]  # two points are needed
    assert [row.state for row in read_points(sweep)] == ["ok", STOPPED_EARLY, "failed", "ok"]
    image = matplotlib_image(tmp_path / "sweep.png")
    assert image.shape[:2] == (960, 1800)
    red = (abs(image[..., :3] - [0.839, 0.153, 0.157]) < 0.02).all(-1)
    assert red[:480].any()
    assert red[480:].any()  # the best point is red in the upper panels and below


def test_sweep_judged_by_speed_has_no_plot_of_its_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [Point(number, str(number), {"parallelism": "ddp"}, []) for number in range(2)]
    sweep = Sweep(tmp_path, "id", "finetune", Path("/r.py"), Path("/"), "r.py", [], ["parallelism"], points)
    sweep.write()
    report_now(sweep)
    assert not (tmp_path / "sweep.png").exists()
    assert "sweep.png" not in capsys.readouterr().out
    report_now(replace(sweep, metric="score"))
    assert "no sweep.png: fewer than two points have a score" in capsys.readouterr().out


def matplotlib_image(file: Path) -> Any:
    """Return the pixels of a PNG, (height, width, channels) in [0, 1]."""
    from matplotlib.image import imread

    return imread(file)
