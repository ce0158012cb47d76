"""The backend of each cluster.kind, and the jobs of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from components.config.schema.cluster import ClusterKind
from components.launch.backend import Backend, Job


def backend_of(kind: ClusterKind) -> Backend:
    """Return the backend that runs what has this cluster.kind."""
    if kind == ClusterKind.slurm:
        from components.launch.slurm.submit import SlurmBackend

        return SlurmBackend()
    from components.launch.local import LocalBackend

    return LocalBackend()


def job_of(run_dir: Path, *, search: bool = False) -> str | None:
    """Return the id of the job submitted for a run directory, by whichever backend: see `Backend.job`."""
    found = (backend.job(run_dir, search=search) for backend in _backends())
    return next((job for job in found if job is not None), None)


def jobs_by_id(ids: Iterable[str]) -> dict[str, Job]:
    """Return the jobs with these ids, whichever backend issued them."""
    wanted, jobs = list(ids), dict[str, Job]()
    for backend in _backends() if wanted else ():
        jobs |= backend.state(wanted)
    return jobs


def stop_command(job: str) -> str | None:
    """Return the command with which the user cancels a job; None if no backend issued its id."""
    commands = (backend.stop_command(job) for backend in _backends())
    return next((command for command in commands if command is not None), None)


def _backends() -> Iterator[Backend]:
    return map(backend_of, ClusterKind)
