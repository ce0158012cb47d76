"""Backend lookup by cluster.kind, and job queries over all backends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from components.config.schema.cluster import ClusterKind
from components.launch.backend import Backend, Job


def backend_of(kind: ClusterKind) -> Backend:
    """Return the backend of a cluster.kind."""
    if kind == ClusterKind.slurm:
        from components.launch.slurm.submit import SlurmBackend

        return SlurmBackend()
    if kind == ClusterKind.k8s:
        from components.launch.k8s.kubernetes_backend import KubernetesBackend

        return KubernetesBackend()
    from components.launch.local import LocalBackend

    return LocalBackend()


def job_of(run_dir: Path, *, search: bool = False) -> str | None:
    """Return the id of the job that any backend submitted for a run directory. See `Backend.job`."""
    found = (backend.job(run_dir, search=search) for backend in _backends())
    return next((job for job in found if job is not None), None)


def jobs_by_id(ids: Iterable[str]) -> dict[str, Job]:
    """Return the jobs with these ids, from all backends."""
    job_ids, jobs = list(ids), dict[str, Job]()
    for backend in _backends() if job_ids else ():
        jobs |= backend.state(job_ids)
    return jobs


def stop(job: str) -> bool:
    """Cancel a job, and return whether its scheduler accepted the request. See `Backend.stop`."""
    return any(backend.stop(job) for backend in _backends() if backend.stop_command(job) is not None)


def stop_command(job: str) -> str | None:
    """Return the shell command that cancels a job; None if the id belongs to no backend."""
    commands = (backend.stop_command(job) for backend in _backends())
    return next((command for command in commands if command is not None), None)


def _backends() -> Iterator[Backend]:
    return map(backend_of, ClusterKind)
