"""Submission from the login node: validation, error messages, and jobs that run exactly the submitted command."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.config.commands import Commands
from tests.slurm.cluster import Cluster, until
from tests.slurm.login import CPU, FINETUNE, QUICK, Login, log_of, result_of, steps_of
from tests.suites import TORTURE, in_torture

VALID = ("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU, *QUICK, "training.global_batch_size=144")
"""Valid apart from the error that a test adds. A batch of 144 sequences is divisible by 2, 8, 9 and 18 processes."""


def test_jobs_of_both_launchers_log_the_losses_of_one_process(login: Login) -> None:
    """The submission does not import torch; the job has eight ranks, one per node. torchrun has two nodes."""
    submission = login.run(
        *("parallelism=fsdp2_tp4", "cluster=slurm_8node", "cluster.procs_per_node=1", "training.max_steps=3"),
        *(*CPU, *QUICK, "checkpoint.export=true", "generation.prompts=[Hello]"),
        python=("-X", "importtime"),
    )
    assert submission.status == 0, submission.errors
    imported = set(re.findall(r"\| +([\w.]+)$", submission.errors, re.MULTILINE))
    assert "components.launch.slurm.submit" in imported
    assert not imported & {"torch", "transformers", "datasets", "numpy"}
    assert submission.field("mesh").endswith("dp_shard=2 x ep=1 x cp=1 x tp=4: 8 processes on 8 nodes")
    ranks_per_node = 2 if TORTURE else 1
    torchrun = login.run(
        *("parallelism=fsdp2", "cluster=slurm_2node", f"cluster.procs_per_node={ranks_per_node}"),
        *("cluster.launcher=torchrun", *CPU, *QUICK, "training.micro_batch_size=1", "training.max_steps=3"),
    )
    single_process = login.run(*QUICK, "parallelism=single", "training.max_steps=3", "run.dir=alone")
    login.wait_for_end(submission)
    run = submission.run_dir
    assert run.parent == login.folder / "outputs" / "finetune"
    expected = {
        "config.yaml",
        "environment.json",
        "code",
        "metrics.jsonl",
        "mesh.svg",
        "logs",
        "checkpoints",
        "export",
        "result.json",
    }
    assert {entry.name for entry in run.iterdir()} >= {*expected, "job.sbatch", "job_id"}
    assert {entry.name for entry in (run / "logs" / "attempt_0").glob("rank_*.log")} == {
        f"rank_{rank}.log" for rank in range(8)
    }
    assert (run / "logs" / "latest").readlink() == Path("attempt_0")
    result = result_of(run)
    assert (result["status"], result["processes"], result["steps"]) == ("ok", 8, 3)
    assert single_process.status == 0, single_process.errors
    login.wait_for_end(torchrun)
    assert result_of(torchrun.run_dir)["processes"] == 2 * ranks_per_node
    for each in (run, torchrun.run_dir):
        assert steps_of(each) == pytest.approx(steps_of(login.folder / "alone"), rel=1e-5)


@in_torture
def test_recipe_under_the_users_own_srun_is_one_run(login: Login) -> None:
    """In the user's own allocation: rank 0 composes the config, and ranks connect through Slurm's step variables."""
    ranks = ("srun", "--nodes=2", "--ntasks-per-node=1", f"--chdir={login.folder}", "env", "OMP_NUM_THREADS=1")
    login.cluster.run(*ranks, sys.executable, str(FINETUNE), *QUICK, "training.max_steps=2", "cluster.device=cpu")
    (run,) = (login.folder / "outputs" / "finetune").iterdir()
    assert (result_of(run)["status"], result_of(run)["processes"]) == ("ok", 2)


def test_edits_after_submission_do_not_reach_the_job(login: Login) -> None:
    """Relative paths are resolved against the folder in which the command was run."""
    body = "(HERE / 'result').write_text(f'{helper.VALUE} {Path(cfg.data.path).read_text()}')"
    recipe = login.write_recipe(body)
    (login.folder / "helper.py").write_text("VALUE = 'before'\n")
    recipe.write_text(f"import helper\n{recipe.read_text()}")
    (login.folder / "mine.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    submission = login.run(
        *("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, "data=jsonl", "data.path=mine.jsonl"),
        "+cluster.sbatch_extra.hold=''",
        recipe=recipe,
    )
    assert submission.status == 0, submission.errors
    recipe.write_text("raise SystemExit('edited')\n")
    (login.folder / "helper.py").write_text("VALUE = 'edited'\n")
    login.cluster.run("scontrol", "release", submission.job)
    login.wait_for_end(submission)
    assert (submission.run_dir / "result").read_text() == 'before {"prompt": "a", "response": "b"}\n'


def test_failing_rank_is_named_last_and_fails_the_job(login: Login) -> None:
    recipe = login.write_recipe(
        """
        if RANK == 1:
            raise RuntimeError("the third layer is missing")
        import time; time.sleep(600)
        """
    )
    submission = login.run("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    job = login.wait_for_end(submission, "FAILED")
    assert job["ExitCode"] != "0:0"
    log = (submission.run_dir / "logs" / "job.log").read_text()
    assert "RuntimeError: the third layer is missing" in log.splitlines()[-2], log
    assert log.splitlines()[-2].startswith("rank 1 on n2 ")
    assert result_of(submission.run_dir)["status"] == "failed"
    until(lambda: not any(map(login.cluster.processes, ("n1", "n2"))), lambda: "processes are left")


def test_killed_rank_is_named_by_srun(login: Login) -> None:
    recipe = login.write_recipe(
        """
        import signal, time
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        raise RuntimeError("Connection closed by peer [10.0.0.2]:4711")
        """
    )
    submission = login.run("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    login.wait_for_end(submission, "FAILED")
    log = (submission.run_dir / "logs" / "job.log").read_text()
    assert "srun: error: n2: task 1: Killed" in log, log
    assert result_of(submission.run_dir)["status"] == "failed"
    until(lambda: not any(map(login.cluster.processes, ("n1", "n2"))), lambda: "processes are left")


@in_torture
def test_run_directory_of_an_active_job_is_rejected(login: Login) -> None:
    recipe = login.write_recipe("import time; time.sleep(600)")
    arguments = ("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, "run.dir=mine")
    submission = login.run(*arguments, recipe=recipe)
    for repeated in (arguments, (*QUICK, "run.dir=mine")):
        refused = login.run(*repeated, recipe=recipe)
        assert refused.status == 2
        assert f"belongs to job {submission.job}, which is" in refused.errors
    login.cluster.cancel(submission.job)
    login.wait_for_end(submission, "CANCELLED")
    second = login.run(*arguments, recipe=login.write_recipe("(HERE / 'second').touch()"))
    login.wait_for_end(second)
    assert (submission.run_dir / "second").exists()
    assert (submission.run_dir / "logs" / "attempt_1").is_dir()


def test_dry_run_prints_the_script_and_writes_nothing(login: Login) -> None:
    before = login.jobs_ever()
    submission = login.run(*VALID, "cluster=slurm_8node", "cluster.dry_run=true")
    assert submission.status == 0, submission.errors
    assert submission.output.startswith("#!/bin/bash\n#SBATCH --job-name=finetune\n#SBATCH --nodes=8\n")
    assert "could start at" in submission.output
    assert not any(login.folder.iterdir())
    assert login.jobs_ever() == before


def test_script_rendered_without_slurm_is_the_one_that_is_submitted(login: Login, tmp_path: Path) -> None:
    """On a PATH with bash alone, and with a SLURM_CONF that does not exist; also of a further attempt."""
    (tmp_path / "bash").symlink_to(shutil.which("bash") or "")
    without = {"PATH": str(tmp_path), "SLURM_CONF": "/nowhere/slurm.conf"}
    arguments = (*VALID, "run.dir=mine", "+cluster.sbatch_extra.hold=''", "cluster.setup=['umask 027']")
    rendered = login.run(*arguments, "cluster.dry_run=render", environment=without)
    assert rendered.status == 0, rendered.errors
    assert not (login.folder / "mine").exists()
    submission = login.run(*arguments)
    assert (submission.run_dir / "job.sbatch").read_text() == rendered.output
    again = login.run(*arguments, "cluster.dry_run=render", environment=without)
    assert again.output == rendered.output
    login.cluster.cancel(submission.job)


@dataclass(frozen=True)
class Refused:
    """Runs commands that are refused before anything is submitted, so that they share an idle cluster."""

    login: Login
    commands: Commands

    def errors(self, *overrides: str, **environment: str) -> str:
        """Return the message of a command that exits 2 and prints nothing else."""
        before = self.login.jobs_ever()
        environment = {"SLURM_CONF": self.login.cluster.environment["SLURM_CONF"], **environment}
        ended = self.commands.run(FINETUNE, (*VALID, *overrides), self.login.folder, **environment)
        assert (ended.status, ended.output) == (2, "")
        assert self.login.jobs_ever() == before
        return ended.errors


@pytest.fixture
def refused(cluster: Cluster, commands: Commands, tmp_path: Path) -> Refused:
    return Refused(Login(cluster, tmp_path), commands)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.partition=nosuch",), "--partition=nosuch: invalid partition specified: nosuch"),
        (("cluster.nodes=9",), "Node count specification invalid"),
        (("cluster.procs_per_node=72",), "Requested node configuration is not available"),
        (("cluster.device=cuda",), "the job requests GPUs, but torch"),
        (("cluster.account=a b",), "cluster.account='a b': is not a valid Slurm account"),
        (("cluster.time=soon",), "cluster.time='soon': is not a time limit"),
        (("cluster.time=5", "cluster.signal_lead_seconds=300"), "lower the lead, or raise cluster.time"),
        (
            ("cluster.nodes=5-8",),
            "cluster.nodes=5-8: on 5 nodes: training.global_batch_size=144: must be a multiple of dp=5",
        ),
        (("parallelism=tp3",), "tp 3 = 3 processes, but there are 2"),
        (("run.dir=a%j",), "run.dir='a%j': holds '%'"),
        (("run.dir=file/run",), "file/run: cannot be used: File exists; choose another run.dir"),
        (('cluster.setup=["echo \'a"]',), 'cluster.setup="echo \'a": bash cannot parse it'),
        (("cluster.template=none.j2",), "cluster.template=none.j2: no such file"),
        (("cluster.sbatch_extra.nodes=3",), "cluster.sbatch_extra.nodes=3: is set by cluster.nodes"),
        (("model.path=owner/absent", "cluster.env.HF_HUB_OFFLINE=1"), "is not in the hub's cache"),
    ],
)
def test_config_error_is_rejected_before_submission(refused: Refused, overrides: tuple[str, ...], message: str) -> None:
    (refused.login.folder / "file").write_text("in the way")
    errors = refused.errors(*overrides)
    assert len(errors.splitlines()) == 1, errors
    assert message in errors
    assert [entry.name for entry in refused.login.folder.iterdir()] == ["file"]


def test_missing_slurm_is_reported_in_one_message(refused: Refused) -> None:
    assert "there is no sbatch on PATH" in refused.errors(PATH="/nowhere")
    errors = refused.errors(SLURM_CONF="/nowhere")
    assert errors == "SLURM_CONF=/nowhere: no such file; unset it, or set it to the cluster's slurm.conf\n"


def test_all_problems_are_reported_at_once(refused: Refused) -> None:
    errors = refused.errors("cluster.partition=nosuch", "training.global_batch_size=7", "run.resume=nowhere")
    for message in ("nosuch", "training.global_batch_size=7", "run.resume=nowhere"):
        assert message in errors


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
FAILURES = {"the answer times out": f"echo '{TIMED_OUT}' >&2; exit 1", "sbatch is killed": "kill -KILL $$"}


@pytest.mark.parametrize("failure", FAILURES)
def test_job_whose_sbatch_fails_after_submission_is_adopted(login: Login, failure: str) -> None:
    """sbatch submits and then fails: the job is found by its comment, or by its script if the user set a comment."""
    program = login.folder / "bin" / "sbatch"
    program.parent.mkdir()
    sbatch = shutil.which("sbatch")
    program.write_text(
        f'#!/bin/sh\n{sbatch} "$@" || exit 1\ncase "$*" in *--test-only*) exit 0;; esac\n{FAILURES[failure]}\n'
    )
    program.chmod(0o755)
    comment = ["+cluster.sbatch_extra.comment='of a user'"] if failure == "sbatch is killed" else []
    submission = login.run(
        *("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, "run.dir=mine", *comment),
        recipe=login.write_recipe("(HERE / 'done').touch()"),
        environment={"PATH": f"{program.parent}:{os.environ['PATH']}"},
    )
    login.wait_for_end(submission)
    assert "the submission failed, but Slurm had accepted the job" in submission.output
    assert (submission.run_dir / "job_id").read_text().strip() == submission.job
    assert (submission.run_dir / "done").exists()
    assert not (submission.run_dir / ".submission").exists()


def test_script_submitted_by_hand_is_a_separate_attempt(login: Login) -> None:
    """Rejected while another job of the run is active; afterwards it keeps logs and result of the first attempt."""
    recipe = login.write_recipe(
        """
        import time
        until = time.monotonic() + 60
        while not Path("go").exists() and time.monotonic() < until:
            time.sleep(0.1)
        print("job", os.environ["SLURM_JOB_ID"], flush=True)
        (HERE / "result.json").write_text(json.dumps({"status": "ok", "job": os.environ["SLURM_JOB_ID"]}))
        """
    )
    submission = login.run("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    run, cluster = submission.run_dir, login.cluster
    cluster.wait_for(submission.job, "RUNNING")
    until((run / "job_id").exists, lambda: log_of(run))
    by_hand = cluster.run("sbatch", "--parsable", str(run / "job.sbatch")).stdout.strip()
    assert cluster.wait_for(by_hand, "FAILED")["ExitCode"] == "2:0"
    assert f"belongs to job {submission.job}, which has not ended; cancel that job, or choose another" in log_of(run)
    (run / "job_id").unlink()  # as if the other job had not written it yet
    at_once = cluster.run("sbatch", "--parsable", "--nodelist=n5", str(run / "job.sbatch")).stdout.strip()
    assert cluster.wait_for(at_once, "FAILED")["ExitCode"] == "2:0"
    assert re.search(
        rf"job {submission.job} .process \d+ on host n1. is training in it; wait for it to finish", log_of(run)
    )
    assert not (run / "result.json").exists()
    (login.folder / "go").touch()
    login.wait_for_end(submission)
    second = cluster.run("sbatch", "--parsable", str(run / "job.sbatch")).stdout.strip()
    cluster.wait_for(second, "COMPLETED")
    first_log, second_log = ((run / "logs" / f"attempt_{number}" / "rank_0.log").read_text() for number in (0, 2))
    assert (first_log, second_log) == (f"job {submission.job}\n", f"job {second}\n")
    (earlier,) = (run / "logs").glob("attempt_*/result.json")
    assert json.loads(earlier.read_text())["job"] == submission.job
    assert (result_of(run)["job"], (run / "job_id").read_text().strip()) == (second, second)
