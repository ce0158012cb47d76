"""The program of each pod: `python -m components.launch.k8s.pod RUN_DIR RECIPE`.

Joins the job's next attempt, checks the node, starts this pod's ranks and forwards SIGTERM to them. The manifest's
podFailurePolicy reads the exit status. 0: the run has finished. EXIT_RESTART: the job replaces the pod, and the run
resumes in the next attempt. Any other status: the job fails and ends all its pods.

The pods agree on an attempt through files in the run directory, since they start at different times, and the job
replaces each pod that stopped. A new pod writes its uid to RUN/logs/pods/JOB/INDEX. The first pod waits until all pods
have done so with uids that no earlier attempt used; it then begins the next attempt and publishes the uids in the
attempt's `pods.json`, where the others find theirs. An attempt ends for all its pods when one of them is replaced. The
first pod publishes how the attempt ended, since only rank 0 writes the result.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.config.compose.frozen import read_section
from components.config.schema.cluster import ClusterConfig, Device
from components.launch.job.attempts import Refused, begin
from components.launch.job.policy import attempt_numbers, attempts_of_job, cause_of, reason_to_end
from components.launch.local import RankProcesses, allocator_defaults, rank_defaults
from components.launch.machine import node_problems
from components.package import PROJECT
from components.protocol.errors import EXIT_INVALID, EXIT_RESTART, ConfigError
from components.protocol.failures import (
    LEFT_EARLY,
    Failure,
    Kind,
    RankExit,
    RankReport,
    first_failure,
    first_to_report,
    print_failure,
    print_problems,
    read_reports,
)
from components.protocol.processes import ATTEMPT, JOB, RUN_DIR, WORKER, collected_signals, whole_number, without_ranks
from components.protocol.run_files import (
    LOGS,
    PRIVATE,
    atomic_write,
    atomic_write_json,
    attempt_logs,
    current_config,
    log_file,
    open_append,
    own_folder,
    read_json,
    read_result,
    read_text,
    record_result,
    refuse_start,
)
from components.terminal import keep_running, open_output, print_text

INDEX, UID, NODE = "JOB_COMPLETION_INDEX", "MESHBOOK_POD_UID", "MESHBOOK_NODE"
"""Variables that Kubernetes and the manifest set in each pod."""
_LOOK_EVERY = 2.0
"""Seconds between checks whether the attempt's other pods have been replaced."""
_OUTCOME_WITHIN = 300.0
"""Seconds that a pod waits for the outcome after its ranks have ended: rank 0 may still export the model."""
_PODS, _MEMBERS, _OUTCOME = "pods", "pods.json", "outcome"
"""Folder of the pods' uids in RUN/logs; files in an attempt's logs: its pods, and how it ended."""
_DONE, RESTART = "done", "restart"
"""Outcomes of an attempt."""
_POLL = 0.5
"""Polling interval for files of other pods, in seconds."""
_REPORT_EVERY = 60.0
"""Seconds between messages of a pod that waits."""


def run_pod(run_dir: Path, recipe: str, environ: Mapping[str, str]) -> int:
    """Take part in an attempt with the ranks of this pod, and return the pod's exit status."""
    try:
        cluster = read_section(current_config(run_dir), "cluster", ClusterConfig)
        pod = _this_pod(run_dir, cluster, environ)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    if pod.has_finished():  # it was replaced after the run had ended, before it could exit
        return 0
    with collected_signals() as signals:
        try:
            attempt = _join_attempt(pod, cluster, lambda: bool(signals))
        except ConfigError as error:
            print_problems(error.problems)
            return EXIT_INVALID
        except Refused as error:
            record_result(run_dir, {"status": "failed", "error": str(error)})
            print_text(error, file=sys.stderr, flush=True)
            return 1
        if attempt is None:
            return EXIT_RESTART  # stopped before there was anything to save
        print_text(
            f"pod {pod.index} of {pod.nodes}, {socket.gethostname()} on {environ.get(NODE) or 'an unknown node'}: "
            f"attempt {attempt}",
            flush=True,
        )
        gpus = int(cluster.procs_per_node) if cluster.device != Device.cpu else 0
        if cluster.health_check and (problems := node_problems(run_dir, gpus)):
            record_result(run_dir, {"status": "failed", "error": f"pod {pod.index}: {'; '.join(problems)}"})
            print_text(*(f"{socket.gethostname()}: {problem}" for problem in problems), sep="\n", file=sys.stderr)
            return 1
        return _PodAttempt(pod, cluster, attempt).run(recipe_file(recipe), environ, signals)


def recipe_file(recipe: str) -> Path:
    """Return the recipe's file: relative to Meshbook's folder in this pod, or absolute."""
    return PROJECT / recipe


class _PodAttempt:
    """An attempt in this pod."""

    def __init__(self, pod: Pod, cluster: ClusterConfig, attempt: int) -> None:
        self.pod, self.cluster, self.attempt = pod, cluster, attempt
        self.logs = attempt_logs(pod.run_dir, attempt)
        self.procs = int(cluster.procs_per_node)
        self.first = pod.index * self.procs
        self.ranks = RankProcesses(self.logs, self.first)
        self.lost: list[int] = []
        """Indices of pods that were replaced."""
        self._next_look = 0.0
        self._shown = 0

    def run(self, recipe: Path, environ: Mapping[str, str], signals: deque[int]) -> int:
        """Start the ranks, wait for their end, and return the pod's exit status."""
        try:
            self._start(recipe, environ)
            self.ranks.watch(signals, self._poll)
        finally:
            self.ranks.kill()
        self._show_log()
        return self._conclude(signals)

    def _start(self, recipe: Path, environ: Mapping[str, str]) -> None:
        master = environ.get("MASTER_ADDR", "")
        shared = rank_defaults(self.procs) | without_ranks(environ) | allocator_defaults(environ)
        shared |= {WORKER: "1", RUN_DIR: str(self.pod.run_dir), ATTEMPT: str(self.attempt), JOB: self.pod.job}
        shared |= {"WORLD_SIZE": str(self.pod.nodes * self.procs), "LOCAL_WORLD_SIZE": str(self.procs)}
        shared |= {"NUM_NODES": str(self.pod.nodes), "NODE_RANK": str(self.pod.index), "MASTER_ADDR": master}
        for local_rank in range(self.procs):
            rank = self.first + local_rank
            with open_append(log_file(self.logs, rank), PRIVATE) as log:
                self.ranks.start(recipe, shared | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}, log)

    def _poll(self) -> None:
        """Show rank 0's log, and end the ranks if another pod of the attempt was replaced."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY
        self._show_log()
        self._look_for_lost_pods()
        if self.lost:
            self.ranks.end()

    def _look_for_lost_pods(self) -> None:
        if not self.lost and (lost := self.pod.lost_members(self.attempt)):
            self.lost = lost
            print_text(f"pods {', '.join(map(str, lost))} were replaced: this attempt cannot continue", flush=True)

    def _show_log(self) -> None:
        """Copy new output of rank 0 to this pod's, for `kubectl logs`."""
        if self.pod.index:
            return
        with open(log_file(self.logs, 0), "rb") as log:
            log.seek(self._shown)
            text = log.read()
        self._shown += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()

    def _conclude(self, signals: deque[int]) -> int:
        """Record and print how the attempt ended, and return the pod's exit status."""
        reports = read_reports(self.logs)
        elsewhere = [
            RankExit(rank, 1, report.time, terminated=False)
            for rank, report in reports.items()
            if rank not in self.ranks.exits
        ]
        failure = first_failure([*self.ranks.exits.values(), *elsewhere], reports)
        if failure is not None and not self._is_consequence(failure):
            return self._failed(failure)
        if self.lost or failure is not None:
            return self._lost_peers(reports)
        if self.pod.index == 0:
            return self._ended_by_itself()
        if any(ended.status for ended in self.ranks.exits.values()):  # by the stop request, before they could handle it
            return self._restart()
        return self._await_outcome(signals)

    def _is_consequence(self, failure: Failure) -> bool:
        """Return whether a failure only follows from the loss of another pod, or of a rank that left."""
        is_lost = failure.what.endswith(LEFT_EARLY) if failure.report is None else failure.report.kind == Kind.lost_peer
        return bool(self.lost) or is_lost

    def _lost_peers(self, reports: Mapping[int, RankReport]) -> int:
        """Print which ranks were lost, as far as it is known, and restart."""
        own = self.ranks.exits.items()
        left = [] if self.lost else [rank for rank, ended in own if ended.status == 0 and not ended.terminated]
        others = set(range(self.pod.nodes * self.procs)) - reports.keys() - self.ranks.exits.keys()
        silent = f" (nothing reported by rank {', '.join(map(str, sorted(others)[:8]))})" if others else ""
        if left:
            print_text(
                f"rank {', '.join(map(str, left))} exited with status 0{LEFT_EARLY}, and others lost it", flush=True
            )
        print_text(f"lost other pods{silent}: to be restarted from the last checkpoint", flush=True)
        return self._restart()

    def _failed(self, failure: Failure) -> int:
        """Record and print a failure, and return the exit status by the limits of `policy`."""
        report, run_dir = failure.report, self.pod.run_dir
        if failure.rank in self.ranks.exits:
            print_failure(failure, self.logs)
        else:
            print_text(f"rank {failure.rank}, in another pod, failed; logs: {self.logs}", flush=True)
        if report is not None and report.is_config:
            if report.kind == Kind.config:
                self._refused(report.message)
            return EXIT_INVALID
        record_result(run_dir, {"status": self.ranks.status_of(failure), "error": failure.error})
        after = cause_of(failure, killed=failure.rank in self.ranks.exits and self.ranks.exits[failure.rank].status < 0)
        if after is None:
            return 1
        reason = self._reason_to_end(after)
        print_text(f"not restarted: {reason}" if reason else "to be restarted from the last checkpoint", flush=True)
        return EXIT_RESTART if reason is None else report.kind.exit_status if report is not None else 1

    def _reason_to_end(self, after: str | None = None) -> str | None:
        """Return why no attempt may follow this one; None if one may."""
        attempts = attempts_of_job(self.pod.run_dir, self.attempt)
        return reason_to_end(self.cluster, attempts, after=after, requeues=max(len(attempts) - 1, 0))

    def _refused(self, message: str) -> None:
        """Record that the start was refused, unless the run before it is restored; each of the pods tries."""
        logs = attempt_logs(self.pod.run_dir, self.attempt)
        if first_to_report(logs) and not refuse_start(self.pod.run_dir, self.attempt):
            record_result(self.pod.run_dir, {"status": "invalid", "error": message})

    def _ended_by_itself(self) -> int:
        """Publish the outcome of the attempt on the first pod, by the result of rank 0."""
        result = read_result(self.pod.run_dir)
        if not result and self.ranks.stops:
            result = {"status": "preempted", "error": "stopped before training started"}
            record_result(self.pod.run_dir, result)
        if result.get("status") not in ("preempted", "interrupted"):
            self.pod.publish(self.attempt, _DONE)
            return 0
        self.pod.publish(self.attempt, RESTART)
        print_text("stopped: to be restarted", flush=True)
        return self._restart()

    def _await_outcome(self, signals: deque[int]) -> int:
        """Return the exit status by the outcome that the first pod publishes."""
        deadline = time.monotonic() + _OUTCOME_WITHIN
        while (outcome := self.pod.outcome(self.attempt)) is None:
            self._look_for_lost_pods()
            reports = read_reports(self.logs)
            if any(report.kind == Kind.lost_peer for report in reports.values()):
                return self._lost_peers(reports)
            if self.lost or signals or time.monotonic() > deadline:
                return self._restart()
            time.sleep(0.5)
        return 0 if outcome == _DONE else self._restart()

    def _restart(self) -> int:
        """Return the status with which this pod is replaced, or 1 on the first pod if a limit is reached."""
        if self.pod.index:
            return EXIT_RESTART
        reason = self._reason_to_end()
        if reason is None:
            return EXIT_RESTART
        print_text(f"not restarted: {reason}; submit the same command again", flush=True)
        return 1


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
        return self.run_dir / LOGS / _PODS / self.job.replace("/", "_")

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
        return read_text(attempt_logs(self.run_dir, attempt) / _OUTCOME) or None

    def has_finished(self) -> bool:
        """Return whether the job's last attempt has finished the run."""
        attempts = attempt_numbers(self.run_dir, self.job)
        return bool(attempts) and self.outcome(max(attempts)) == _DONE

    def publish(self, attempt: int, outcome: str) -> None:
        """Publish how the attempt ended."""
        atomic_write(attempt_logs(self.run_dir, attempt) / _OUTCOME, outcome, PRIVATE)


def _join_attempt(pod: Pod, cluster: ClusterConfig, stopped: Callable[[], bool]) -> int | None:
    """Wait for the other pods, and return the number of the attempt that starts; None if `stopped` became true.

    Raises Refused if the others do not start within cluster.startup_timeout_minutes, or if a limit is reached.
    """
    pod.announce()
    began, reported = time.monotonic(), time.monotonic()
    while not stopped():
        missing = _missing(pod) if pod.index == 0 else []
        attempt = _find(pod) if pod.index else None if missing else _begin(pod)
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


def _missing(pod: Pod) -> list[int]:
    """Return the indices of pods that have not started since the last attempt."""
    newest, used = pod.announced(), _used(pod)
    return [index for index in range(pod.nodes) if newest.get(index) is None or newest[index] in used]


def _used(pod: Pod) -> set[str]:
    """Return the uids of the pods of all attempts."""
    return {uid for attempt in attempt_numbers(pod.run_dir) for uid in _members(pod.run_dir, attempt).values()}


def _find(pod: Pod) -> int | None:
    """Return the attempt that this pod is part of, if the first pod has begun it."""
    for attempt in reversed(attempt_numbers(pod.run_dir)):
        if _members(pod.run_dir, attempt).get(pod.index) == pod.uid:
            return attempt
    return None


def _begin(pod: Pod) -> int:
    """Begin the next attempt, and publish its pods. Raises Refused if a limit is reached."""
    members = pod.announced()
    attempt = begin(pod.run_dir, pod.job, limit_requeues=True)
    published = {str(index): uid for index, uid in members.items()}
    atomic_write_json(attempt_logs(pod.run_dir, attempt) / _MEMBERS, published, PRIVATE)
    return attempt


def _members(run_dir: Path, attempt: int) -> dict[int, str]:
    """Return the uids of an attempt's pods by index; empty if it has not begun."""
    members = read_json(attempt_logs(run_dir, attempt) / _MEMBERS)
    return {number: uid for index, uid in members.items() if (number := whole_number(index)) is not None}


def _this_pod(run_dir: Path, cluster: ClusterConfig, environ: Mapping[str, str]) -> Pod:
    """Return this pod by its variables. Raises ConfigError if they are missing."""
    missing = [name for name in (INDEX, UID, JOB) if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: this program runs in the pods of an Indexed Job; a template of yours must "
            "set the variables of k8s/pod.yaml.j2"
        )
    index = whole_number(environ[INDEX])
    if index is None:
        raise ConfigError(f"{INDEX}={environ[INDEX][:40]!r}: must be a whole number, as an Indexed Job sets it")
    return Pod(run_dir, environ[JOB], index, cluster.most_nodes, environ[UID])


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(run_pod(Path(sys.argv[1]), sys.argv[2], dict(os.environ)))
