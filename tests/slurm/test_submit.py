"""From the login node: checked, submitted, told, and what the job then does is what was typed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import until
from tests.slurm.login import CPU, FINETUNE, QUICK, Login, log_of, result_of, steps_of

REFUSED = ("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU, *QUICK, "training.global_batch_size=144")
"""Without a mistake, were it not for the one that a test adds. 144 sequences suit 2, 8, 9 and 18 processes."""


def test_the_title_command_with_eight_nodes(login: Login) -> None:
    """Submitted without torch, at once; eight ranks, one per node; the losses of one process here."""
    answer = login.type(
        *("parallelism=fsdp2_tp4", "cluster=slurm_8node", "cluster.procs_per_node=1", "training.max_steps=3"),
        *(*CPU, *QUICK, "checkpoint.export=true", "generation.prompts=[Hello]"),
        python=("-X", "importtime"),
    )
    assert answer.status == 0, answer.errors
    imported = set(re.findall(r"\| +([\w.]+)$", answer.errors, re.MULTILINE))
    assert "components.launch.slurm.submit" in imported
    assert not imported & {"torch", "transformers", "datasets", "numpy"}
    assert answer.field("mesh").endswith("dp_shard=2 x ep=1 x cp=1 x tp=4: 8 processes on 8 nodes")
    alone = login.type(*QUICK, "parallelism=single", "training.max_steps=3", "run.dir=alone")
    login.ended(answer)
    run = answer.run_dir
    assert run.parent == login.folder / "outputs" / "finetune"
    kept = {"config.yaml", "environment.json", "code", "metrics.jsonl", "logs", "checkpoints", "export", "result.json"}
    assert {entry.name for entry in run.iterdir()} >= {*kept, "job.sbatch", "job_id"}
    assert {entry.name for entry in (run / "logs" / "attempt_0").glob("rank_*.log")} == {
        f"rank_{rank}.log" for rank in range(8)
    }
    assert (run / "logs" / "latest").readlink() == Path("attempt_0")
    result = result_of(run)
    assert (result["status"], result["processes"], result["steps"]) == ("ok", 8, 3)
    assert alone.status == 0, alone.errors
    assert steps_of(run) == pytest.approx(steps_of(login.folder / "alone"), rel=1e-5)


def test_torchruns_agents_run_the_same(login: Login) -> None:
    answer = login.type(
        *("parallelism=fsdp2", "cluster=slurm_2node", "cluster.procs_per_node=2", "cluster.launcher=torchrun"),
        *(*CPU, *QUICK, "training.micro_batch_size=1", "training.max_steps=3"),
    )
    alone = login.type(*QUICK, "parallelism=single", "training.max_steps=3", "run.dir=alone")
    login.ended(answer)
    assert result_of(answer.run_dir)["processes"] == 4
    assert steps_of(answer.run_dir) == pytest.approx(steps_of(login.folder / "alone"), rel=1e-5)
    assert alone.status == 0


def test_a_persons_own_srun_is_a_run_like_any_other(login: Login) -> None:
    """In an allocation of one's own: rank 0 composes, and the ranks find one another by what Slurm says of the step."""
    ranks = ("srun", "--nodes=2", "--ntasks-per-node=1", f"--chdir={login.folder}", "env", "OMP_NUM_THREADS=1")
    login.cluster.run(*ranks, sys.executable, str(FINETUNE), *QUICK, "training.max_steps=2", "cluster.device=cpu")
    (run,) = (login.folder / "outputs" / "finetune").iterdir()
    assert (result_of(run)["status"], result_of(run)["processes"]) == ("ok", 2)


def test_what_is_edited_after_submission_does_not_reach_the_job(login: Login) -> None:
    """Nor do paths change their meaning: they are relative to where the command was typed."""
    body = "(HERE / 'said').write_text(f'{helper.WORD} {Path(cfg.data.path).read_text()}')"
    recipe = login.write_recipe(body)
    (login.folder / "helper.py").write_text("WORD = 'before'\n")
    recipe.write_text(f"import helper\n{recipe.read_text()}")
    (login.folder / "mine.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    answer = login.type(
        *("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, "data=jsonl", "data.path=mine.jsonl"),
        "+cluster.sbatch_extra.hold=''",
        recipe=recipe,
    )
    assert answer.status == 0, answer.errors
    recipe.write_text("raise SystemExit('edited')\n")
    (login.folder / "helper.py").write_text("WORD = 'edited'\n")
    login.cluster.run("scontrol", "release", answer.job)
    login.ended(answer)
    assert (answer.run_dir / "said").read_text() == 'before {"prompt": "a", "response": "b"}\n'


def test_a_rank_that_fails_is_the_last_word_and_the_jobs_status(login: Login) -> None:
    recipe = login.write_recipe(
        """
        if RANK == 1:
            raise RuntimeError("the third layer is missing")
        import time; time.sleep(600)
        """
    )
    answer = login.type("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    job = login.ended(answer, "FAILED")
    assert job["ExitCode"] != "0:0"
    log = (answer.run_dir / "logs" / "job.log").read_text()
    assert "RuntimeError: the third layer is missing" in log.splitlines()[-2], log
    assert log.splitlines()[-2].startswith("rank 1 on n2 ")
    assert result_of(answer.run_dir)["status"] == "failed"
    until(lambda: not any(map(login.cluster.processes, ("n1", "n2"))), lambda: "processes are left")


def test_a_rank_that_dies_without_a_word_is_named_by_srun(login: Login) -> None:
    recipe = login.write_recipe(
        """
        import signal, time
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        raise RuntimeError("Connection closed by peer [10.0.0.2]:4711")
        """
    )
    answer = login.type("cluster=slurm_2node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    login.ended(answer, "FAILED")
    log = (answer.run_dir / "logs" / "job.log").read_text()
    assert "srun: error: n2: task 1: Killed" in log, log
    assert result_of(answer.run_dir)["status"] == "failed"
    until(lambda: not any(map(login.cluster.processes, ("n1", "n2"))), lambda: "processes are left")


def test_a_job_that_is_not_over_owns_its_directory(login: Login) -> None:
    recipe = login.write_recipe("import time; time.sleep(600)")
    arguments = ("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, "run.dir=mine")
    answer = login.type(*arguments, recipe=recipe)
    for again in (arguments, (*QUICK, "run.dir=mine")):
        refused = login.type(*again, recipe=recipe)
        assert refused.status == 2
        assert f"belongs to job {answer.job}, which is" in refused.errors
    login.cluster.cancel(answer.job)
    login.ended(answer, "CANCELLED")
    second = login.type(*arguments, recipe=login.write_recipe("(HERE / 'second').touch()"))
    login.ended(second)
    assert (answer.run_dir / "second").exists()
    assert (answer.run_dir / "logs" / "attempt_1").is_dir()


def test_a_dry_run_prints_the_script_and_leaves_nothing(login: Login) -> None:
    before = login.jobs_ever()
    answer = login.type(*REFUSED, "cluster=slurm_8node", "cluster.dry_run=true")
    assert answer.status == 0, answer.errors
    assert answer.output.startswith("#!/bin/bash\n#SBATCH --job-name=finetune\n#SBATCH --nodes=8\n")
    assert "could start at" in answer.output
    assert not any(login.folder.iterdir())
    assert login.jobs_ever() == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (("cluster.partition=nosuch",), "--partition=nosuch: invalid partition specified: nosuch"),
        (("cluster.nodes=9",), "Node count specification invalid"),
        (("cluster.procs_per_node=72",), "Requested node configuration is not available"),
        (("cluster.device=cuda",), "the job requests GPUs, but torch"),
        (("cluster.account=a b",), "cluster.account='a b': is not a valid Slurm account"),
        (("cluster.time=soon",), "cluster.time='soon': is not a time limit"),
        (("cluster.time=5", "cluster.signal_lead_seconds=300"), "lower the lead, or raise cluster.time"),
        (("parallelism=tp3",), "tp 3 = 3 processes, but there are 2"),
        (("run.dir=a%j",), "run.dir='a%j': holds '%'"),
        (("run.dir=file/run",), "file/run: cannot be used: File exists; choose another run.dir"),
        (('cluster.setup=["echo \'a"]',), 'cluster.setup="echo \'a": bash cannot parse it'),
        (("cluster.template=none.j2",), "cluster.template=none.j2: no such file"),
        (("cluster.sbatch_extra.nodes=3",), "cluster.sbatch_extra.nodes=3: is set by cluster.nodes"),
        (("model.path=owner/absent", "cluster.env.HF_HUB_OFFLINE=1"), "is not in the hub's cache"),
    ],
)
def test_mistakes_are_refused_before_anything_is_submitted(login: Login, wrong: tuple[str, ...], told: str) -> None:
    (login.folder / "file").write_text("in the way")
    before = login.jobs_ever()
    refused = login.type(*REFUSED, *wrong)
    assert (refused.status, refused.output) == (2, "")
    assert len(refused.errors.splitlines()) == 1, refused.errors
    assert told in refused.errors
    assert [entry.name for entry in login.folder.iterdir()] == ["file"]
    assert login.jobs_ever() == before


def test_without_slurm_there_is_one_message(login: Login) -> None:
    refused = login.type(*REFUSED, environment={"PATH": "/nowhere"})
    assert refused.status == 2
    assert "there is no sbatch on PATH" in refused.errors
    refused = login.type(*REFUSED, environment={"SLURM_CONF": "/nowhere"})
    assert (refused.status, refused.output) == (2, "")
    assert refused.errors == "SLURM_CONF=/nowhere: no such file; unset it, or set it to the cluster's slurm.conf\n"


def test_every_problem_is_told_at_once(login: Login) -> None:
    wrong = ("cluster.partition=nosuch", "training.global_batch_size=7", "run.resume=nowhere")
    refused = login.type(*REFUSED, *wrong)
    assert refused.status == 2
    for part in ("nosuch", "training.global_batch_size=7", "run.resume=nowhere"):
        assert part in refused.errors


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
LATE = {"the answer times out": f"echo '{TIMED_OUT}' >&2; exit 1", "sbatch is killed": "kill -KILL $$"}


@pytest.mark.parametrize("end", LATE)
def test_a_job_whose_submission_fails_after_slurm_took_it_is_adopted(login: Login, end: str) -> None:
    """sbatch submits, and fails afterwards: the job is found by its comment, or by its script where that is taken."""
    program = login.folder / "bin" / "sbatch"
    program.parent.mkdir()
    sbatch = shutil.which("sbatch")
    program.write_text(f'#!/bin/sh\n{sbatch} "$@" || exit 1\ncase "$*" in *--test-only*) exit 0;; esac\n{LATE[end]}\n')
    program.chmod(0o755)
    comment = ["+cluster.sbatch_extra.comment='of a person'"] if end == "sbatch is killed" else []
    answer = login.type(
        *("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, "run.dir=mine", *comment),
        recipe=login.write_recipe("(HERE / 'done').touch()"),
        environment={"PATH": f"{program.parent}:{os.environ['PATH']}"},
    )
    login.ended(answer)
    assert "sbatch failed, but Slurm had accepted the job" in answer.output
    assert (answer.run_dir / "job_id").read_text().strip() == answer.job
    assert (answer.run_dir / "done").exists()
    assert not (answer.run_dir / ".submission").exists()


def test_the_script_by_hand_is_an_attempt_of_its_own(login: Login) -> None:
    """Not while another job of the run is alive; then neither logs nor the result of the first attempt change."""
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
    answer = login.type("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK, recipe=recipe)
    run, cluster = answer.run_dir, login.cluster
    cluster.wait_for(answer.job, "RUNNING")
    until((run / "job_id").exists, lambda: log_of(run))
    by_hand = cluster.run("sbatch", "--parsable", str(run / "job.sbatch")).stdout.strip()
    assert cluster.wait_for(by_hand, "FAILED")["ExitCode"] == "2:0"
    assert f"belongs to job {answer.job}, which has not ended; cancel it with scancel {answer.job}" in log_of(run)
    (run / "job_id").unlink()  # a script that looks before the other one has written it
    at_once = cluster.run("sbatch", "--parsable", "--nodelist=n5", str(run / "job.sbatch")).stdout.strip()
    assert cluster.wait_for(at_once, "FAILED")["ExitCode"] == "2:0"
    assert re.search(
        rf"job {answer.job} .process \d+ on host n1. is training in it; wait for it to finish", log_of(run)
    )
    assert not (run / "result.json").exists()
    (login.folder / "go").touch()
    login.ended(answer)
    second = cluster.run("sbatch", "--parsable", str(run / "job.sbatch")).stdout.strip()
    cluster.wait_for(second, "COMPLETED")
    first_log, second_log = ((run / "logs" / f"attempt_{number}" / "rank_0.log").read_text() for number in (0, 2))
    assert (first_log, second_log) == (f"job {answer.job}\n", f"job {second}\n")
    (earlier,) = (run / "logs").glob("attempt_*/result.json")
    assert json.loads(earlier.read_text())["job"] == answer.job
    assert (result_of(run)["job"], (run / "job_id").read_text().strip()) == (second, second)
