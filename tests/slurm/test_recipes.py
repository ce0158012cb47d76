"""dpo, distill and classify as Slurm jobs on two nodes: preempted and requeued, with the losses of a local run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.recipes.small_jobs import job, lines_of, write_data
from tests.slurm.cluster import WAIT_TIMEOUT
from tests.slurm.login import CPU, Login, log_of, result_of
from tests.slurm.test_stops import await_step, by_a_higher_priority_job

STEPS = 60


@pytest.mark.parametrize("name", ["dpo", "distill", "classify"])
def test_preempted_job_resumes_with_the_losses_of_a_local_run(login: Login, name: str) -> None:
    """The local run has two processes and the same mesh, so that its losses are bitwise equal."""
    write_data(login.folder)
    recipe, arguments = job(name)
    command = (*arguments, "parallelism=fsdp2", f"training.max_steps={STEPS}", "training.eval_every=0")
    submission = login.run(
        *(*command, "cluster=slurm_2node", "cluster.procs_per_node=1", "cluster.signal_lead_seconds=20", *CPU),
        recipe=recipe,
    )
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

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    local = [sys.executable, str(recipe), *command, "cluster=local_2proc", "run.dir=local"]
    subprocess.run(
        local, cwd=login.folder, env=environment, check=True, capture_output=True, text=True, timeout=WAIT_TIMEOUT
    )
    assert lines_of(run) == lines_of(login.folder / "local")
    assert len(lines_of(run)) == STEPS
