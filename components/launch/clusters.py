"""Backend lookup by cluster.kind, and the jobs of all schedulers, each found by the form of its id."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from components.config.schema.cluster import ClusterConfig, ClusterKind, CustomClusterConfig
from components.launch.backend import Backend, Job, JobState, record_job, recorded_job
from components.launch.job.scheduler import Scheduler
from components.protocol.errors import IMPORT_PATH, ConfigError
from components.protocol.run_files import SUBMISSION, read_text

_OF_FACTORY = re.compile(rf"(?P<factory>{IMPORT_PATH})/.*", re.DOTALL)


def backend_of(cluster: ClusterConfig) -> Backend:
    """Return the backend of a cluster. Raises ConfigError if that of cluster.factory cannot be imported."""
    if isinstance(cluster, CustomClusterConfig):
        return _own_scheduler(cluster.factory)
    if cluster.kind == ClusterKind.slurm:
        from components.launch.slurm.submit import SlurmScheduler

        return SlurmScheduler()
    if cluster.kind == ClusterKind.k8s:
        from components.launch.k8s.submit import KubernetesScheduler

        return KubernetesScheduler()
    from components.launch.local import LocalBackend

    return LocalBackend()


def job_of(run_dir: Path, *, search: bool = False) -> str | None:
    """Return the id of the job that was submitted for a run directory; None if there is none.

    Args:
        run_dir: The run directory.
        search: Query the scheduler for a job whose submission was not confirmed, and record its id. Raises ConfigError
            if the scheduler does not respond.
    """
    job = recorded_job(run_dir)
    if job is None and search and os.path.lexists(run_dir / SUBMISSION):
        tag = read_text(run_dir / SUBMISSION).strip()
        if (scheduler := _scheduler_of(tag)) is not None:
            found = scheduler.find(run_dir / scheduler.file, tag.removeprefix(scheduler.prefix))
            if found is not None:
                job = scheduler.prefix + found
                record_job(run_dir, job)
    return job


def jobs_by_id(ids: Iterable[str]) -> dict[str, Job]:
    """Return the jobs with these ids, in one query per scheduler; ids of no scheduler are omitted."""
    groups = dict[str, list[str]]()
    schedulers = dict[str, Scheduler]()
    jobs = dict[str, Job]()
    for job in ids:
        try:
            scheduler = _scheduler_of(job)
        except ConfigError as error:
            jobs[job] = _unknown(job, error)
            continue
        if scheduler is not None:
            name = scheduler.prefix or scheduler.name
            schedulers[name] = scheduler
            groups.setdefault(name, []).append(job.removeprefix(scheduler.prefix))
    for name, group in groups.items():
        prefix = schedulers[name].prefix
        try:
            found = schedulers[name].query(group)
        except ConfigError as error:
            found = {job: _unknown(job, error) for job in group}
        jobs |= {prefix + job: replace(each, id=prefix + job) for job, each in found.items()}
    return jobs


def _unknown(job: str, error: ConfigError) -> Job:
    return Job(job, "its scheduler", JobState.unknown, "unknown", over=False, doubt=str(error))


def stop(job: str) -> bool:
    """Cancel a job, and return whether its scheduler accepted the request."""
    scheduler = _scheduler_of(job)
    return scheduler is not None and scheduler.cancel(job.removeprefix(scheduler.prefix))


def stop_command(job: str) -> str | None:
    """Return the shell command that cancels a job; None if the id belongs to no scheduler."""
    scheduler = _scheduler_of(job)
    return None if scheduler is None else scheduler.cancel_command(job.removeprefix(scheduler.prefix))


def _scheduler_of(job: str) -> Scheduler | None:
    """Return the scheduler of a job id, or of the tag of a submission; None if it is of no known form."""
    if own := _OF_FACTORY.fullmatch(job):
        return _own_scheduler(own["factory"])
    from components.launch.k8s.submit import KubernetesScheduler
    from components.launch.slurm.submit import SlurmScheduler

    found = (each for each in (SlurmScheduler(), KubernetesScheduler()) if each.owns(job))
    return next(found, None)


def _own_scheduler(factory: str) -> Scheduler:
    """Return the user's scheduler. Raises ConfigError if it cannot be imported or is none."""
    key = f"cluster.factory={factory}"
    try:
        found = pkgutil.resolve_name(factory)
    except Exception as error:  # of the user's module, which may also come from the files of a foreign run
        raise ConfigError(
            f"{key}: cannot be imported: {type(error).__name__}: {error}; put the file next to the recipe, or its "
            "folder on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ConfigError(f"{key}: is no subclass of components.launch.job.scheduler.Scheduler")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: does not define {', '.join(missing)}; see examples/own_scheduler")
    scheduler = found()
    scheduler.prefix = f"{factory}/"
    return scheduler
