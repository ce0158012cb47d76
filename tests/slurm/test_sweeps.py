"""A sweep over mesh shapes from the login node: all points are submitted, reported in one table, and can be retried."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import ENDED, until
from tests.slurm.login import CPU, PROJECT, QUICK, Login
from tests.suites import in_torture

SHAPES = "parallelism=ddp,tp2,tp3,fsdp2_cp2"
MAIN = """
    if cfg.parallelism.cp > 1 and not Path("fits").exists():
        everything = bytearray(2**45)  # exceeds any address space
    speed = 100.0 / cfg.parallelism.tp
    values = {"status": "ok", "tokens_per_second": speed, "last_loss": 2.5, "first_loss": 5.5, "processes": 2}
    if RANK == 0:
        (HERE / "result.json").write_text(json.dumps(values))
"""


def report(login: Login, sweep: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "scripts" / "sweep_report.py"), str(sweep), *options]
    return subprocess.run(
        command, cwd=login.folder, env=login.cluster.environment, capture_output=True, text=True, check=False
    )


def test_sweep_reports_ok_invalid_and_oom_jobs_and_retries_one(login: Login) -> None:
    recipe = login.write_recipe(MAIN)
    submission = login.run(
        *("-m", SHAPES, "cluster=slurm_1node", "cluster.procs_per_node=2", *CPU, *QUICK, "run.dir=sweep"),
        recipe=recipe,
    )
    assert submission.status == 1, submission.errors  # tp3 could not be submitted
    sweep = login.folder / "sweep"
    for point in ("0_ddp", "1_tp2", "3_fsdp2_cp2"):
        login.cluster.wait_for((sweep / point / "job_id").read_text().strip(), ENDED)
    done = report(login, sweep)
    assert done.returncode == 1
    states = _states(sweep)
    assert states == {
        "0_ddp": "ok",
        "1_tp2": "ok",
        "2_tp3": "invalid",
        "3_fsdp2_cp2": "oom",
    }, done.stdout
    (login.folder / "fits").touch()
    retried = report(login, sweep, "--retry", "oom")
    assert "3_fsdp2_cp2" in retried.stdout, retried.stderr
    login.cluster.wait_for((sweep / "3_fsdp2_cp2" / "job_id").read_text().strip(), ENDED)
    assert _states(sweep, report(login, sweep).stdout)["3_fsdp2_cp2"] == "ok"
    assert _states(sweep)["2_tp3"] == "invalid"


STUDY_MAIN = """
    import signal, time
    from components.config.stored_run import MetricsLog
    number, stops = int(HERE.name.split("_")[0]), []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    score = [1.0, 2.0, 3.0, 4.0, 9.0, 0.5][number]
    MetricsLog(HERE).append({"step": 1, "score": score})
    while not stops and (number == 4 or not Path("release").exists()):
        time.sleep(0.1)
    if not stops:
        MetricsLog(HERE).append({"step": 2, "score": score})
    values = {"status": "preempted" if stops else "ok", "score": score}
    (HERE / "result.json").write_text(json.dumps(values))
"""


@in_torture
def test_study_limits_its_jobs_stops_a_loser_and_continues_after_a_kill(login: Login) -> None:
    """The study is killed while its first two jobs run, which continue; the fifth job only ends if it is stopped."""
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    recipe, before = login.write_recipe(STUDY_MAIN), login.jobs_ever()
    command = (
        *("-m", "optimizer.lr=loguniform(1e-5,1e-1)", "sweep.trials=6", "sweep.parallel=2", "sweep.metric=score"),
        *("sweep.goal=min", "sweep.early_stop=median", "cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK),
        "run.dir=study",
    )
    environment = login.cluster.environment | {"CUDA_VISIBLE_DEVICES": ""}
    study = subprocess.Popen([sys.executable, str(recipe), *command], cwd=login.folder, env=environment)
    sweep = login.folder / "study"
    until(lambda: len(list(sweep.glob("[01]_*/metrics.jsonl"))) == 2, str)
    study.kill()
    study.wait()
    assert len(login.jobs_ever() - before) == 2
    (login.folder / "release").touch()
    done = login.run(*command, recipe=recipe)
    assert list(_states(sweep).values()) == ["ok"] * 5 + ["stopped early"], done.output
    assert done.status == 0, done.errors
    # The sixth point, 0.5, may have been measured before.
    median = r"the median of (4 points there is 2\.5|5 points there is 2)\b"
    assert re.search(rf"stopped early: score is 9 at best up to step 1; {median}", done.output), done.output
    assert len(login.jobs_ever() - before) == 6


def _states(sweep: Path, _: str = "") -> dict[str, str]:
    """Return the status of every run in report.csv."""
    lines = (sweep / "report.csv").read_text().splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=False)) for line in lines[1:]]
    return {row["run"]: row["status"] for row in rows}
