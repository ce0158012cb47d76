"""The Slurm backend: copy the code, render the batch script, submit it with sbatch, and print a summary."""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from components.config.rules import legal_node_counts
from components.config.schema.cluster import ClusterConfig
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig
from components.config.shape import read_shape
from components.launch.backend import (
    CheckedRun,
    Job,
    UnknownSubmission,
    print_job,
    record_job,
    recorded_job,
)
from components.launch.run_checks import affects
from components.launch.slurm.job_checks import job_problems, refusal
from components.launch.slurm.jobs import (
    TAG,
    NoResponse,
    adopt_submission,
    describe_job,
    find_submission,
    job_states,
    run_slurm,
    stop_job,
)
from components.launch.slurm.script import BatchScript, render
from components.launch.slurm.snapshot import ROOT, copied_recipe_path, copy_code
from components.protocol.errors import ConfigError
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

_LOST_ANSWERS = ("timed out", "Zero Bytes", "send/recv", "Unexpected message", "slurm controller", "onnection")
"""Substrings of sbatch's errors if the controller did not respond in time; it may have accepted the job."""
QUERIES, PAUSE = 5, 2.0
"""Number of squeue queries for a job whose submission was not confirmed, and the seconds between them."""


class SlurmBackend:
    """Backend that submits jobs to Slurm with sbatch. Job ids are decimal numbers."""

    runs_here = False

    def validate(
        self, cfg: RecipeConfig, processes: int, rejected: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Check the script, paths and caches, and run sbatch --test-only. Notes: estimated start, local paths."""
        return ([], []) if quick else job_problems(cfg, query=not affects(rejected, ["cluster"]))

    def show(self, run: CheckedRun) -> None:
        """Print the batch script that `submit` would submit."""
        print_job(run, render(_batch_script(run)), f"submit this script with sbatch as {run.directory.path / SCRIPT}")

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Submit the run and print a summary; return 0, or 1 if it is unknown whether Slurm accepted the job."""
        cfg, directory = run.cfg, run.directory
        code, script = directory.path / CODE, directory.path / SCRIPT
        try:
            keep_only_folder(code)
            files = copy_code(run.recipe.file, code) if cfg.cluster.snapshot else 0
            batch = _batch_script(run)
            atomic_write(script, render(batch), PRIVATE)
            open_append(directory.path / LOGS / "job.log", PRIVATE).close()  # Slurm appends to it
            job = _submit_script(script, cfg.cluster, run.notes)
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
            directory.discard("interrupted during submission")
            raise
        _print_summary(run, job, files, batch.node_counts)
        return 0

    def job(self, run_dir: Path, *, search: bool = False) -> str | None:
        """Return the id of the job submitted for a run directory. See `Backend.job`."""
        return adopt_submission(run_dir) if search else recorded_job(run_dir)

    def state(self, jobs: Iterable[str]) -> dict[str, Job]:
        """Return the jobs with these ids."""
        return {job: describe_job(job, state) for job, state in job_states(jobs).items()}

    def stop(self, job: str) -> bool:
        """Cancel a job with scancel."""
        return stop_job(job)

    def stop_command(self, job: str) -> str | None:
        """Return the scancel command; None for an id of another backend."""
        return f"scancel {job}" if job.isdecimal() else None


def _submit_script(script: Path, cluster: ClusterConfig, notes: list[str]) -> str:
    """Submit a batch script, record the job id in the run directory, and return it.

    sbatch may fail although the job was submitted, if the response of a busy controller is late or lost. The job
    therefore gets a unique comment, and squeue is searched for it after any failure.

    Raises:
        ConfigError: Slurm rejected the job, or has no such job.
        UnknownSubmission: sbatch failed, and squeue does not respond either.
    """
    run_dir, tag = script.parent, "" if "comment" in cluster.sbatch_extra else f"{TAG}{secrets.token_hex(8)}"
    earlier = recorded_job(run_dir)  # has ended: checked when the run directory was opened
    atomic_write(run_dir / SUBMISSION, tag)
    (run_dir / JOB_ID).unlink(missing_ok=True)
    failure: ConfigError
    try:
        answer = run_slurm(["sbatch", "--parsable", *([f"--comment={tag}"] if tag else []), str(script)])
        job = answer.output.partition(";")[0]
        if answer.status == 0 and job.isdecimal():
            record_job(run_dir, job)
            return job
        lost = answer.status < 0 or any(text in answer.errors for text in _LOST_ANSWERS)
        why = answer.errors or f"it exited with status {answer.status}"
        failure = ConfigError(
            f"cluster.kind=slurm: sbatch failed: {why}; run the command again"
            if lost
            else refusal(answer.errors.splitlines(), cluster)
        )
    except NoResponse as error:
        lost, failure = True, error
    except KeyboardInterrupt:
        _cancel(tag, script)
        raise
    found = _find_job(tag, script, failure, retry=lost)
    if found is None:
        (run_dir / SUBMISSION).unlink()
        if earlier is not None:
            record_job(run_dir, earlier)
        raise failure
    record_job(run_dir, found)
    notes.append(f"sbatch failed, but Slurm had accepted the job, which squeue lists: {failure}")
    return found


def _find_job(tag: str, script: Path, failure: ConfigError, *, retry: bool) -> str | None:
    """Return the job of a failed submission, or None. With `retry`, give the job time to appear in squeue."""
    for query in range(QUERIES if retry else 1):
        time.sleep(PAUSE if query else 0)
        try:
            job = find_submission(tag, script)
        except ConfigError as error:
            if not retry:
                return None  # sbatch's error implies that nothing was submitted
            search = f"squeue --me -o '%A %k' | grep {tag}" if tag else f"squeue --me -o '%A %o' | grep {script}"
            raise UnknownSubmission(
                f"{failure}\nIt is unknown whether Slurm accepted the job, since squeue does not respond either: "
                f"{error}\nThe run directory {script.parent} is kept. Once Slurm responds, find the job with {search}, "
                "or run the command again with this run.dir: it looks for the job first"
            ) from error
        if job is not None:
            return job
    return None


def _cancel(tag: str, script: Path) -> None:
    """Cancel the job of an interrupted submission if Slurm has accepted it, and print the outcome."""
    try:
        job = find_submission(tag, script)
        done = job is None or stop_job(job)
    except ConfigError:
        comment = tag or "the one in cluster.sbatch_extra"
        print_text(f"interrupted: look for the job with squeue --me; its comment is {comment}", file=sys.stderr)
        return
    if job is not None:
        ending = "was cancelled" if done else f"could not be cancelled: run scancel {job}"
        print_text(f"interrupted: job {job}, which Slurm had accepted, {ending}", file=sys.stderr)


def _batch_script(run: CheckedRun) -> BatchScript:
    """Return the template's input for a run, with the paths of the code's copy if there is one."""
    recipe, cfg, run_dir = run.recipe, run.cfg, run.directory.path
    copied = cfg.cluster.snapshot
    return BatchScript(
        cluster=cfg.cluster,
        node_counts=_node_counts(cfg),
        name=cfg.run.name or recipe.name,
        run_dir=run_dir,
        attempt=run.directory.attempt,
        private=cfg.run.private,
        code=run_dir / CODE if copied else ROOT,
        recipe=copied_recipe_path(recipe.file, run_dir / CODE) if copied else recipe.file,
        folder=Path.cwd(),
    )


def _node_counts(cfg: RecipeConfig) -> list[int]:
    """Return the numbers of nodes on which a run can train, in order."""
    cluster = cfg.cluster
    if cluster.fewest_nodes == cluster.most_nodes:
        return [cluster.most_nodes]
    return legal_node_counts(cfg, read_shape(cfg.model))


def _print_summary(run: CheckedRun, job: str, files: int, node_counts: list[int]) -> None:
    """Print the job, and the commands to follow, stop and requeue it."""
    cluster, logs = run.cfg.cluster, run.directory.path / LOGS
    followed = shlex.join([str(logs / "job.log"), str(logs / "latest" / "rank_0.log")])
    rows = [
        ("run", str(run.directory.path)),
        ("mesh", f"{run.cfg.parallelism.resolve(run.processes)}: {describe_processes(run.processes)} on "
         f"{cluster.nodes} node{'s' if cluster.most_nodes > 1 else ''}"),
        *([("nodes", f"each attempt uses {' or '.join(map(str, node_counts))}")] if len(node_counts) > 1 else []),
        ("code", f"{files} files copied: later edits do not affect the job" if files else str(ROOT)),
        *(("note", note) for note in run.notes),
        ("job", job),
        ("follow", f"tail -F {followed}"),
        ("stop", f"scancel {job}"),
        ("save, requeue", f"scancel --signal=USR2 {job}"),
    ]  # fmt: skip
    for name, value in rows:
        print_text(f"{name:<14} {value}")
