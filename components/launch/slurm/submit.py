"""The Slurm backend: copy the code, render the batch script, submit it with sbatch, and print how to follow it."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from components.config.errors import ConfigError
from components.config.schema.cluster import ClusterConfig
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig
from components.launch.backend import CheckedRun, Job, Recipe
from components.launch.run_checks import affects
from components.launch.slurm.commands import NoAnswer, ask
from components.launch.slurm.job_checks import job_problems, refusal
from components.launch.slurm.jobs import (
    adopt_submission,
    describe_job,
    find_submission,
    job_states,
    record_job,
    recorded_job,
    stop_job,
)
from components.launch.slurm.script import BatchScript, render
from components.launch.slurm.snapshot import PROJECT, copy_code, place_of_copy
from components.protocol.run_files import (
    CODE,
    JOB_ID,
    LOGS,
    PRIVATE,
    SCRIPT,
    SUBMISSION,
    atomic_write,
    keep_only_folder,
    open_append,
)
from components.terminal import print_text

LOST_ANSWERS = ("timed out", "Zero Bytes", "send/recv", "Unexpected message", "slurm controller", "onnection")
"""How sbatch reports that the controller did not answer; it may have taken the job."""
LOOKS, PAUSE = 5, 2.0
"""Queries of squeue for a job whose submission got no answer, and the seconds between two."""


class UnknownSubmission(Exception):
    """sbatch failed and squeue does not answer: Slurm may or may not have taken the job."""


class SlurmBackend:
    """Submits to Slurm with sbatch. Job ids are numbers."""

    runs_here = False

    def validate(
        self, cfg: RecipeConfig, processes: int, refused: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Check the script, paths and caches, and run sbatch --test-only. Notes: earliest start, local paths."""
        return ([], []) if quick else job_problems(cfg, ask_slurm=not affects(refused, ["cluster"]))

    def show(self, recipe: Recipe, cfg: RecipeConfig, processes: int, notes: list[str]) -> None:
        """Print the script that would be submitted."""
        run_dir = Path(os.path.expanduser(cfg.run.dir or Path("outputs") / recipe.name / "TIME-HEX")).absolute()
        print_text(render(_batch_script(recipe, cfg, run_dir, 0)), end="")
        for note in ("cluster.dry_run=true: would submit this script with sbatch", *notes):
            print_text(f"# {note}")

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Submit the run, print how to follow and stop it, and return 0; 1 if it is unknown whether Slurm took it."""
        cfg, directory = run.cfg, run.directory
        code, script = directory.path / CODE, directory.path / SCRIPT
        try:
            keep_only_folder(code, links=False)
            files = copy_code(run.recipe.file, code) if cfg.cluster.snapshot else 0
            text = render(_batch_script(run.recipe, cfg, directory.path, directory.attempt))
            atomic_write(script, text, PRIVATE)
            open_append(directory.path / LOGS / "job.log", PRIVATE).close()  # Slurm appends to it
            job = _hand_over(script, cfg.cluster, run.notes)
        except UnknownSubmission as error:
            print_text(error, file=sys.stderr, flush=True)
            return 1
        except ConfigError as error:
            directory.discard(str(error))
            raise
        except OSError as error:
            directory.discard(str(error))
            raise ConfigError(
                f"run.dir={directory.path}: cannot be written: {error}; choose another run.dir"
            ) from error
        except KeyboardInterrupt:
            directory.discard("interrupted while it was submitted")
            raise
        _print_summary(run, job, files)
        return 0

    def job(self, run_dir: Path, *, search: bool = False) -> str | None:
        """Return the number of the job submitted for a run directory: see `Backend.job`."""
        return adopt_submission(run_dir) if search else recorded_job(run_dir)

    def state(self, jobs: Iterable[str]) -> dict[str, Job]:
        """Return the jobs with these numbers; with one query for all of them."""
        return {job: describe_job(job, state) for job, state in job_states(jobs).items()}

    def stop(self, job: str) -> bool:
        """Cancel a job with scancel."""
        return stop_job(job)

    def stop_command(self, job: str) -> str | None:
        """Return the scancel command."""
        return f"scancel {job}" if job.isdigit() else None


def _hand_over(script: Path, cluster: ClusterConfig, notes: list[str]) -> str:
    """Submit a batch script and return the number of its job, which is then in the run directory too.

    An sbatch that fails may have submitted the job all the same: the answer of a busy controller can be late or lost.
    So the job gets a unique comment, and after any failure squeue is searched for it.

    Raises:
        ConfigError: Slurm refused the job, or has no such job.
        UnknownSubmission: sbatch failed, and squeue does not answer either.
    """
    run_dir, tag = script.parent, "" if "comment" in cluster.sbatch_extra else f"meshbook:{secrets.token_hex(8)}"
    earlier = recorded_job(run_dir)  # it has ended: the run directory is locked, and its owner was looked up
    atomic_write(run_dir / SUBMISSION, tag)
    (run_dir / JOB_ID).unlink(missing_ok=True)
    refused: ConfigError
    try:
        answer = ask(["sbatch", "--parsable", *([f"--comment={tag}"] if tag else []), str(script)])
        job = answer.output.partition(";")[0]
        if answer.status == 0 and job.isdigit():
            record_job(run_dir, job)
            return job
        lost = answer.status < 0 or any(sign in answer.errors for sign in LOST_ANSWERS)
        why = answer.errors or f"it ended with status {answer.status}"
        refused = ConfigError(
            f"cluster.kind=slurm: sbatch failed: {why}; type the command again"
            if lost
            else refusal(answer.errors.splitlines(), cluster)
        )
    except NoAnswer as error:
        lost, refused = True, error
    except KeyboardInterrupt:
        _cancel(tag, script)
        raise
    found = _look_for(tag, script, refused, patient=lost)
    if found is None:
        (run_dir / SUBMISSION).unlink()
        if earlier is not None:
            record_job(run_dir, earlier)
        raise refused
    record_job(run_dir, found)
    notes.append(f"sbatch failed after Slurm had taken the job, which squeue lists: {refused}")
    return found


def _look_for(tag: str, script: Path, failure: ConfigError, *, patient: bool) -> str | None:
    """Return the job of a submission that failed, or None; where the answer was lost it may take a moment to appear."""
    for look in range(LOOKS if patient else 1):
        time.sleep(PAUSE if look else 0)
        try:
            job = find_submission(tag, script)
        except ConfigError as error:
            if not patient:
                return None  # sbatch reported that it submitted nothing
            search = f"squeue --me -o '%A %k' | grep {tag}" if tag else f"squeue --me -o '%A %o' | grep {script}"
            raise UnknownSubmission(
                f"{failure}\nIt is unknown whether Slurm took the job, as squeue does not answer either: {error}\n"
                f"The run directory {script.parent} is kept. Once Slurm answers, find the job with {search}, or type "
                "the command again with this run.dir: it looks for the job first"
            ) from error
        if job is not None:
            return job
    return None


def _cancel(tag: str, script: Path) -> None:
    """Cancel the job of an interrupted submission, if Slurm has taken it; print what happened."""
    try:
        job = find_submission(tag, script)
        done = job is None or stop_job(job)
    except ConfigError:
        print_text(f"interrupted: look for the job with squeue --me; its comment is {tag or 'yours'}", file=sys.stderr)
        return
    if job is not None:
        ending = "was cancelled" if done else f"could not be cancelled: run scancel {job}"
        print_text(f"interrupted: job {job}, which Slurm had taken, {ending}", file=sys.stderr)


def _batch_script(recipe: Recipe, cfg: RecipeConfig, run_dir: Path, attempt: int) -> BatchScript:
    copied = cfg.cluster.snapshot
    return BatchScript(
        cluster=cfg.cluster,
        name=cfg.run.name or recipe.name,
        run_dir=run_dir,
        attempt=attempt,
        private=cfg.run.private,
        code=run_dir / CODE if copied else PROJECT,
        recipe=place_of_copy(recipe.file, run_dir / CODE) if copied else recipe.file,
        folder=Path.cwd(),
    )


def _print_summary(run: CheckedRun, job: str, files: int) -> None:
    cluster, logs = run.cfg.cluster, run.directory.path / LOGS
    followed = shlex.join([str(logs / "job.log"), str(logs / "latest" / "rank_0.log")])
    rows = [
        ("run", str(run.directory.path)),
        ("mesh", f"{run.cfg.parallelism.resolve(run.processes)}: {describe_processes(run.processes)} on "
         f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"),
        ("code", f"{files} files copied: an edit from here on does not reach the job" if files else str(PROJECT)),
        *(("note", note) for note in run.notes),
        ("job", job),
        ("follow", f"tail -F {followed}"),
        ("stop", f"scancel {job}"),
        ("save, requeue", f"scancel --signal=USR2 {job}"),
    ]  # fmt: skip
    for name, value in rows:
        print_text(f"{name:<14} {value}")
