"""The Kubernetes backend: render the manifest, create its objects with kubectl, and print a summary."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from components.config.schema.checks import raise_all
from components.config.schema.cluster import ClusterConfig
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig
from components.launch.backend import (
    CheckedRun,
    Job,
    UnknownSubmission,
    print_job,
    record_job,
    recorded_job,
)
from components.launch.k8s.cluster_checks import as_notes, job_problems, refusal
from components.launch.k8s.pod_jobs import (
    JobName,
    Unreachable,
    adopt_submission,
    create,
    job_states,
    run_kubectl,
    stop_command,
    stop_job,
    submitted_job,
)
from components.launch.k8s.pod_manifest import (
    RUN_LABEL,
    PodManifest,
    code_in_pods,
    is_workload,
    mounted_at,
    new_job_name,
    objects_in,
    recipe_in_pods,
    render,
)
from components.launch.run_checks import affects
from components.project import PROJECT
from components.protocol.errors import ConfigError
from components.protocol.run_files import JOB_ID, JOB_MANIFEST, LOGS, PRIVATE, SUBMISSION, atomic_write
from components.terminal import print_text

TRIES, PAUSE = 3, 2.0
"""Number of attempts to create a job if the cluster does not answer, and the seconds between them."""


class KubernetesBackend:
    """Backend that creates jobs with kubectl. Job ids are NAMESPACE/job/NAME or NAMESPACE/jobset/NAME, and @CONTEXT."""

    runs_here = False

    def validate(
        self, cfg: RecipeConfig, processes: int, rejected: Collection[str], *, quick: bool = False
    ) -> tuple[list[str], list[str]]:
        """Check image, volumes and paths, and with kubectl the namespace, permissions, claims, quota and manifest."""
        return ([], []) if quick or affects(rejected, ["cluster"]) else job_problems(cfg)

    def show(self, run: CheckedRun) -> None:
        """Print the manifest that `submit` would create."""
        run.notes.extend(as_notes(_recipe_problems(run)) if run.cfg.cluster.only_renders else [])
        print_job(run, render(_manifest(run)), "create these objects with kubectl")

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Create the job and print a summary; return 0, or 1 if it is unknown whether the cluster has the job."""
        cfg, directory = run.cfg, run.directory
        try:
            manifest = _manifest(run)
            text = render(manifest)
            atomic_write(directory.path / JOB_MANIFEST, text, PRIVATE)
            _create_job(directory.path, manifest.job, objects_in(text, JOB_MANIFEST), cfg.cluster)
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
        _print_summary(run, manifest)
        return 0

    def job(self, run_dir: Path, *, search: bool = False) -> str | None:
        """Return the id of the job submitted for a run directory. See `Backend.job`."""
        return adopt_submission(run_dir) if search else submitted_job(run_dir)

    def state(self, jobs: Iterable[str]) -> dict[str, Job]:
        """Return the jobs with these ids."""
        return job_states(jobs)

    def stop(self, job: str) -> bool:
        """Delete a job: its pods receive SIGTERM, save and exit."""
        name = JobName.parse(job)
        return name is not None and stop_job(name)

    def stop_command(self, job: str) -> str | None:
        """Return the kubectl delete command; None for an id of another backend."""
        name = JobName.parse(job)
        return None if name is None else stop_command(name)


def _recipe_problems(run: CheckedRun) -> list[str]:
    """Check that the pods can read the recipe."""
    cluster, file = run.cfg.cluster, run.recipe.file
    if file.is_relative_to(PROJECT) or mounted_at(cluster, file) is not None:
        return []
    return [
        f"{file}: this recipe is on no volume of cluster.k8s.volumes, so that the pods could not read it; copy it to "
        f"one of {', '.join(cluster.k8s.volumes.values())}"
    ]


def _manifest(run: CheckedRun) -> PodManifest:
    """Return the template's input for a run, with a new name. Raises ConfigError if the pods cannot read the recipe."""
    cluster = run.cfg.cluster
    raise_all([] if cluster.only_renders else _recipe_problems(run))
    name = new_job_name(cluster, run.cfg.run.name or run.recipe.name)
    return PodManifest(cluster, name, run.directory.path, recipe_in_pods(run.recipe.file), Path.cwd())


def _create_job(run_dir: Path, job: JobName, objects: list[dict[str, Any]], cluster: ClusterConfig) -> None:
    """Create the objects of a manifest, and record the job's id in the run directory.

    The other objects refer to the job as their owner, so that the cluster deletes them with it. A creation may fail
    although the server carried it out, if its answer is lost: the job's name, which no other one has, is recorded
    first, and a repeated creation is then refused as AlreadyExists.

    Raises:
        ConfigError: The cluster rejected an object; the job does not exist.
        UnknownSubmission: The cluster did not answer any attempt.
    """
    earlier = recorded_job(run_dir)  # has ended: checked when the run directory was opened
    atomic_write(run_dir / SUBMISSION, str(job))
    (run_dir / JOB_ID).unlink(missing_ok=True)
    others = [each for each in objects if not is_workload(each)]
    try:
        owner = _create_workload(job, next(filter(is_workload, objects)), cluster)
        for each in others:
            each["metadata"]["ownerReferences"] = [owner]
            answer = create(job.context, job.namespace, each)
            if answer.status and answer.reason != "AlreadyExists":
                stop_job(job)
                raise ConfigError(refusal(answer, cluster))
    except Unreachable as error:
        raise UnknownSubmission(
            f"{error}\nIt is unknown whether the cluster has the job {job.name}.\nThe run directory {run_dir} is kept. "
            f"Delete the job with {stop_command(job)}, or run the command again with this run.dir: it looks for the job"
        ) from error
    except ConfigError:
        (run_dir / SUBMISSION).unlink()
        if earlier is not None:
            record_job(run_dir, earlier)
        raise
    except KeyboardInterrupt:
        _cancel(job)
        raise
    record_job(run_dir, str(job))


def _create_workload(job: JobName, body: dict[str, Any], cluster: ClusterConfig) -> dict[str, str]:
    """Create the Job or JobSet, and return the reference to it as the owner of other objects.

    Raises:
        ConfigError: The cluster rejected it.
        Unreachable: The cluster did not answer any attempt.
    """
    for attempt in range(1, TRIES + 1):
        try:
            answer = create(job.context, job.namespace, body)
            break
        except Unreachable:
            if attempt == TRIES:
                raise
            time.sleep(PAUSE)
    if answer.status and answer.reason != "AlreadyExists":
        raise ConfigError(refusal(answer, cluster))
    created = answer.json() if answer.status == 0 else run_kubectl(job.context, ["get", "--raw", job.path]).json()
    uid = (created.get("metadata") or {}).get("uid", "")
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "name": job.name, "uid": uid}


def _cancel(job: JobName) -> None:
    """Delete the job of an interrupted submission if the cluster has it, and print the outcome."""
    try:
        deleted = stop_job(job)
    except ConfigError:
        print_text(f"interrupted: the cluster may have the job; delete it with {stop_command(job)}", file=sys.stderr)
        return
    if deleted:
        print_text(f"interrupted: the job {job.name}, which the cluster had accepted, was deleted", file=sys.stderr)


def _print_summary(run: CheckedRun, manifest: PodManifest) -> None:
    """Print the job, and the commands to follow, stop and restart it."""
    cluster, job, logs = run.cfg.cluster, manifest.job, run.directory.path / LOGS
    pods = f"-l {RUN_LABEL}={job.name}"
    first = f"{pods},batch.kubernetes.io/job-completion-index=0"
    rows = [
        ("run", str(run.directory.path)),
        ("mesh", f"{run.cfg.parallelism.resolve(run.processes)}: {describe_processes(run.processes)} in "
         f"{cluster.nodes} pod{'s' if cluster.most_nodes > 1 else ''}"),
        ("code", code_in_pods(cluster) or f"that of the image {cluster.k8s.image}"),
        *(("note", note) for note in run.notes),
        ("job", str(job)),
        ("follow", job.command("logs", "-f", first)),
        ("", f"tail -F {shlex.quote(str(logs / 'latest' / 'rank_0.log'))}"),
        ("pods", job.command("describe", "pods", pods)),
        ("stop", stop_command(job)),
        ("save, restart", job.command("delete", "pods", "--wait=false", first)),
    ]  # fmt: skip
    for name, value in rows:
        print_text(f"{name:<14} {value}")
