"""Agreement of the pods of a job on an attempt, through files in the run directory, and the limits on attempts.

A job's pods start at different times, and the job replaces each pod that stopped. A new pod writes its uid to
RUN/logs/pods/JOB/INDEX. The first pod waits until all pods have done so with uids that no earlier attempt used; it then
claims the next attempt and publishes the uids in the attempt's `pods.json`, where the others find theirs. An attempt
ends for all its pods when one of them is replaced. The first pod publishes how the attempt ended, since only rank 0
writes the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from components.config.schema.cluster import ClusterConfig
from components.launch.run_directory.directory import point_latest
from components.launch.scheduled_jobs import CHECKPOINTS_BEFORE, JOB, Remedies, attempts_of_job, lack_of_progress
from components.protocol.failures import Kind
from components.protocol.role import whole_number
from components.protocol.run_files import (
    CHECKPOINTS,
    FIRST_STEP,
    LOGS,
    PRIVATE,
    REQUEUE,
    RESULT,
    atomic_write,
    atomic_write_json,
    attempt_logs,
    names_in,
    numbers_in,
    open_new,
    own_folder,
    read_json,
    read_text,
)
from components.terminal import print_text

PODS, MEMBERS, OUTCOME = "pods", "pods.json", "outcome"
"""Folder of the pods' uids in RUN/logs; files in an attempt's logs: its pods, and how it ended."""
DONE, RESTART = "done", "restart"
"""Outcomes of an attempt."""
_POLL = 0.5
"""Polling interval for files of other pods, in seconds."""
_REPORT_EVERY = 60.0
"""Seconds between messages of a pod that waits."""

_REMEDIES = Remedies(
    longer_save="cluster.signal_lead_seconds, the grace period of the pods",
    longer_attempt="set cluster.k8s.priority_class to a class that is preempted less",
)


class Refused(Exception):
    """No attempt is started; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a job."""

    run_dir: Path
    job: str
    """Id of the job."""
    index: int
    nodes: int
    """Number of pods."""
    uid: str

    @property
    def folder(self) -> Path:
        """Folder of the uids of the job's pods."""
        return self.run_dir / LOGS / PODS / self.job.replace("/", "_")

    def announce(self) -> None:
        """Write the uid of this pod."""
        for folder in (self.run_dir / LOGS, self.folder.parent, self.folder):
            own_folder(folder)
        atomic_write(self.folder / str(self.index), self.uid, PRIVATE)

    def announced(self) -> dict[int, str]:
        """Return the uids of the newest pods by index."""
        uids = {}
        for index in range(self.nodes):
            if uid := read_text(self.folder / str(index)):
                uids[index] = uid
        return uids

    def lost_members(self, attempt: int) -> list[int]:
        """Return the indices of the attempt's pods that have been replaced."""
        members, newest = _members(self.run_dir, attempt), self.announced()
        return [index for index, uid in members.items() if newest.get(index, uid) != uid]

    def outcome(self, attempt: int) -> str | None:
        """Return how the attempt ended, if the first pod has published it."""
        return read_text(attempt_logs(self.run_dir, attempt) / OUTCOME) or None

    def has_finished(self) -> bool:
        """Return whether the job's last attempt has finished the run."""
        attempts = _attempts_of(self)
        return bool(attempts) and self.outcome(max(attempts)) == DONE

    def publish(self, attempt: int, outcome: str) -> None:
        """Publish how the attempt ended."""
        atomic_write(attempt_logs(self.run_dir, attempt) / OUTCOME, outcome, PRIVATE)


def join_attempt(pod: Pod, cluster: ClusterConfig, stopped: Callable[[], bool]) -> int | None:
    """Wait for the other pods, and return the number of the attempt that starts; None if `stopped` became true.

    Raises Refused if the others do not start within cluster.startup_timeout_minutes, or if a limit is reached.
    """
    pod.announce()
    began, reported = time.monotonic(), time.monotonic()
    while not stopped():
        missing = _missing(pod) if pod.index == 0 else []
        attempt = _find(pod) if pod.index else None if missing else _begin(pod, cluster)
        if attempt is not None:
            return attempt
        waited = time.monotonic() - began
        who = f"pods {', '.join(map(str, missing))}" if missing else "pod 0"
        if waited > cluster.startup_timeout.total_seconds():
            raise Refused(
                f"{who} did not start within cluster.startup_timeout_minutes={cluster.startup_timeout_minutes:g}; "
                "raise it, or let a queue start all pods at once (cluster.k8s.queue)"
            )
        if time.monotonic() - reported > _REPORT_EVERY:
            reported = time.monotonic()
            print_text(f"waiting for {who}, {waited:.0f} s", flush=True)
        time.sleep(_POLL)
    return None


def reason_not_to_restart(run_dir: Path, attempt: int, cluster: ClusterConfig, *, hung: bool = False) -> str | None:
    """Return why no attempt may follow number `attempt` of its job, naming the limit; None if one may."""
    attempts = attempts_of_job(run_dir, attempt)
    policy, section = cluster.requeue, "cluster.requeue"
    if hung and not any(each.stepped for each in attempts):
        return "the run hung before its first step, so it would likely hang again"
    if hung and sum(each.status == Kind.hung for each in attempts) > policy.hang:
        return f"the limit of {policy.hang} restarts after a hang is reached ({section}.hang)"
    if len(attempts) > policy.max:
        return f"the limit of {policy.max} restarts is reached ({section}.max)"
    return lack_of_progress(run_dir, attempts, _REMEDIES)


def _missing(pod: Pod) -> list[int]:
    """Return the indices of pods that have not started since the last attempt."""
    newest, used = pod.announced(), _used(pod)
    return [index for index in range(pod.nodes) if newest.get(index) is None or newest[index] in used]


def _used(pod: Pod) -> set[str]:
    """Return the uids of the pods of all attempts."""
    return {uid for attempt in _attempts(pod.run_dir) for uid in _members(pod.run_dir, attempt).values()}


def _find(pod: Pod) -> int | None:
    """Return the attempt that this pod is part of, if the first pod has begun it."""
    for attempt in sorted(_attempts(pod.run_dir), reverse=True):
        if _members(pod.run_dir, attempt).get(pod.index) == pod.uid:
            return attempt
    return None


def _begin(pod: Pod, cluster: ClusterConfig) -> int:
    """Claim the next attempt, prepare its logs, and publish its pods. Raises Refused if a limit is reached."""
    members, run_dir = pod.announced(), pod.run_dir
    earlier = _attempts_of(pod)
    if earlier and (reason := reason_not_to_restart(run_dir, max(earlier), cluster)):
        raise Refused(f"not restarted: {reason}")
    attempt = _claim(run_dir, pod.job)
    logs = attempt_logs(run_dir, attempt)
    for name in (RESULT, f"{LOGS}/{FIRST_STEP}"):
        with suppress(FileNotFoundError):
            (run_dir / name).replace(attempt_logs(run_dir, attempt - 1) / Path(name).name)
    (run_dir / REQUEUE).unlink(missing_ok=True)
    saved = names_in(run_dir / CHECKPOINTS)
    atomic_write(logs / CHECKPOINTS_BEFORE, "".join(f"{name}\n" for name in saved), PRIVATE)
    point_latest(run_dir / LOGS / "latest", logs)
    atomic_write_json(logs / MEMBERS, {str(index): uid for index, uid in members.items()}, PRIVATE)
    return attempt


def _claim(run_dir: Path, job: str) -> int:
    """Create the file with the job's id in the first attempt's logs that have none, and return the attempt."""
    attempt = max(_attempts(run_dir), default=0)
    while True:
        logs = attempt_logs(run_dir, attempt)
        own_folder(logs)
        try:
            with open_new(logs / JOB) as file:
                file.write(f"{job}\n".encode())
            return attempt
        except FileExistsError:
            attempt += 1


def _attempts(run_dir: Path) -> list[int]:
    """Return the numbers of all attempts of the run."""
    return numbers_in(run_dir / LOGS, "attempt_")


def _attempts_of(pod: Pod) -> list[int]:
    """Return the numbers of the attempts of the pod's job."""
    run_dir = pod.run_dir
    return [each for each in _attempts(run_dir) if _text(attempt_logs(run_dir, each) / JOB) == f"{pod.job}\n"]


def _members(run_dir: Path, attempt: int) -> dict[int, str]:
    """Return the uids of an attempt's pods by index; empty if it has not begun."""
    members = read_json(attempt_logs(run_dir, attempt) / MEMBERS)
    return {number: uid for index, uid in members.items() if (number := whole_number(index)) is not None}


def _text(file: Path) -> str:
    return read_text(file)
