"""dpo, distill, classify and grpo as Slurm jobs on two nodes: preempted and requeued, with the losses of a local run;
and a teacher that one job stores and another reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.small_jobs import job, lines_of, write_data
from tests.slurm.cluster import WAIT_TIMEOUT
from tests.slurm.login import CPU, PROJECT, Login, log_of, result_of
from tests.slurm.test_stops import await_step, by_a_higher_priority_job
from tests.suites import in_torture

STEPS = 60
TWO_NODES = ("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU)


def run_locally(login: Login, recipe: Path, *command: str) -> None:
    """Run a recipe with two processes on the login node, in the run directory `local`."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    local = [sys.executable, str(recipe), *command, "cluster=local_2proc", "run.dir=local"]
    subprocess.run(
        local, cwd=login.folder, env=environment, check=True, capture_output=True, text=True, timeout=WAIT_TIMEOUT
    )


@in_torture
@pytest.mark.parametrize("name", ["dpo", "distill", "classify", "grpo"])
def test_preempted_job_resumes_with_the_losses_of_a_local_run(login: Login, name: str) -> None:
    """The local run has two processes and the same mesh, so that its losses are bitwise equal."""
    write_data(login.folder)
    recipe, arguments = job(name)
    command = (*arguments, "parallelism=fsdp2", f"training.max_steps={STEPS}", "training.eval_every=0")
    submission = login.run(*command, *TWO_NODES, "cluster.signal_lead_seconds=20", recipe=recipe)
    assert submission.status == 0, submission.errors
    run = submission.run_dir
    await_step(run, 5)
    by_a_higher_priority_job(login, submission.job)
    ended = login.wait_for_end(submission)
    assert int(ended["Restarts"]) >= 1, log_of(run)
    before = json.loads((run / "logs" / "attempt_0" / "result.json").read_text())
    assert (before["status"], result_of(run)["status"]) == ("preempted", "ok")
    assert before["steps"] < STEPS
    assert "resumed from" in (run / "logs" / "attempt_1" / "rank_0.log").read_text()

    run_locally(login, recipe, *command)
    assert lines_of(run) == lines_of(login.folder / "local")
    assert len(lines_of(run)) == STEPS


@in_torture
def test_teacher_that_one_job_stores_trains_a_student_in_another(login: Login) -> None:
    """With every token of the vocabulary stored, the losses are those of a local run with the teacher on its mesh."""
    write_data(login.folder)
    recipe, arguments = job("distill")
    settings = [each for each in arguments if each != "teacher.path=teacher"]
    whole = ("teacher.path=teacher", "teacher.top_k=264", "run.dir=stored", "parallelism=tp2")
    storing = login.run(*settings, *whole, *TWO_NODES, recipe=PROJECT / "scripts" / "teacher.py")
    login.wait_for_end(storing)
    assert "the 264 most likely tokens hold 100.00% of the probability" in log_of(storing.run_dir)
    assert result_of(storing.run_dir)["status"] == "ok"

    command = ("parallelism=fsdp2", "training.max_steps=5", "training.eval_every=5")
    training = login.run(*settings, "teacher.stored=stored", *command, *TWO_NODES, recipe=recipe)
    login.wait_for_end(training)
    run_locally(login, recipe, *arguments, *command)
    for key in ("loss", "eval_loss"):
        found, expected = lines_of(training.run_dir, key), lines_of(login.folder / "local", key)
        assert len(found) == len(expected) > 0
        for line, other in zip(found, expected, strict=True):
            assert line == pytest.approx(other, rel=1e-4, abs=1e-5)
