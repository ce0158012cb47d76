"""The beginning and the end of an attempt: `begin`, which batch scripts and pods call, and `conclude` of batch scripts.

An attempt is one start of the ranks of a run; its logs are in RUN/logs/attempt_N. `begin` claims the next number, moves
the result of the attempt before, applies the limits of `policy`, and chooses the nodes. `conclude` reports the first
failure, writes result.json if no rank did, and decides what follows: the marker RUN/restart asks for a new start of the
ranks in this job, RUN/requeue for a new start of the job, without the nodes that it lists.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from components.config.schema.cluster import ClusterConfig
from components.config.schema.schedulers import Launcher, seconds_of
from components.launch.backend import recorded_job
from components.launch.job.policy import (
    CHECKPOINTS_BEFORE,
    JOB,
    LIMITS,
    RESTARTED,
    JobAttempt,
    attempt_numbers,
    attempts_of_job,
    cause_of,
    cluster_of,
    job_of_attempt,
    lines_of,
    reason_to_end,
)
from components.launch.run_directory import point_latest
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import (
    LEFT_EARLY,
    Failure,
    Kind,
    RankExit,
    first_failure,
    print_failure,
    read_reports,
)
from components.protocol.run_files import (
    CANCELLED,
    CHECKPOINTS,
    CONFIG,
    FIRST_STEP,
    JOB_ID,
    LOGS,
    PRIVATE,
    RECORD,
    REQUEUE,
    RESTART,
    RESULT,
    atomic_write,
    attempt_logs,
    create_marker,
    current_config,
    keep_only_file,
    log_file,
    names_in,
    open_append,
    open_new,
    own_folder,
    read_result,
    read_text,
    record_result,
    refuse_start,
    set_aside,
)
from components.terminal import print_text

_NODES, _FAILED_NODES, _LEFT_OUT_NODES = "nodes", "failed_nodes", "left_out_nodes"
"""Files in an attempt's logs with one node per line: the nodes of its ranks, those of them that failed, and those
because of which the job was requeued before the ranks started."""
_FAILURES = 2
"""Number of attempts in which a node may fail before it is no longer used."""
_STOPPED_EARLY = 128 + signal.SIGUSR2
"""Exit status of the ranks' parent if a rank was killed by SIGUSR2, the stop request, before it could handle it."""
_KILLED_BELOW_AGENT = re.compile(r"exitcode\s*: -\d+")
"""torchrun's message about a rank that was ended by a signal."""
_START_MARGIN = 60
"""Seconds that a new start needs before the stop signal of the time limit."""


class Refused(Exception):
    """No attempt is started, and the job ends; the message is the reason, which is in result.json."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, as its scheduler sees it."""

    status: int
    """Exit status of the ranks' parent, such as srun."""
    cancelled: bool = False
    """Whether the user cancelled the job."""
    seconds_left: float | None = None
    """Seconds until the job's time limit if the ranks can be started again in this job, infinite without a limit; None
    if they cannot."""
    up: Sequence[str] | None = None
    """Nodes that a requeued job could get, each NODE|FEATURE,FEATURE; None if the scheduler cannot exclude nodes."""
    excluded: Collection[str] = ()
    """Nodes that the job excludes already."""


def begin(
    run_dir: Path,
    job: str,
    *,
    nodes: Sequence[str] = (),
    counts: Sequence[int] = (),
    down: Sequence[str] = (),
    ended: str = "",
    limit_requeues: bool = False,
) -> int:
    """Claim the next attempt of a run, prepare its logs and choose its nodes; return its number.

    Where too few nodes are left, the marker RUN/requeue asks for other ones: the ranks must not be started then.

    Args:
        run_dir: The run directory.
        job: Id of the job.
        nodes: Nodes of the job; none if the scheduler does not name them.
        counts: Numbers of nodes that the run can use, in order.
        down: Nodes that are down, each NODE|STATE|REASON.
        ended: The job of RUN/job_id if it has ended, and is another one.
        limit_requeues: Apply cluster.requeue.max, too, since the scheduler starts the job again by itself.

    Raises:
        ConfigError: There is no run, or it belongs to another job that has not ended. Nothing was written.
        Refused: A limit is reached.
    """
    if not current_config(run_dir).is_file():
        raise ConfigError(f"run.dir={run_dir}: no longer contains a run; submit the command again")
    owner = recorded_job(run_dir)
    if owner is not None and owner not in (job, ended):
        if owner.endswith(f"/{job}"):
            raise ConfigError(f"--job {job}: RUN_DIR/job_id has {owner}; pass this id, with its beginning")
        raise ConfigError(
            f"run.dir={run_dir}: belongs to job {owner}, which has not ended; cancel that job, or choose another "
            "run.dir"
        )
    if owner != job:  # the script was submitted by hand, or the launcher has not recorded it yet
        atomic_write(run_dir / JOB_ID, f"{job}\n")
    attempt = _claim(run_dir, job)
    logs = attempt_logs(run_dir, attempt)
    _keep_last_attempt(run_dir, attempt)
    atomic_write(logs / CHECKPOINTS_BEFORE, _as_lines(names_in(run_dir / CHECKPOINTS)), PRIVATE)
    if nodes:
        atomic_write(logs / _NODES, _as_lines(nodes), PRIVATE)
    point_latest(run_dir / LOGS / "latest", logs)
    settings = cluster_of(run_dir)
    _check_limits(run_dir, attempt, settings, limit_requeues=limit_requeues)
    if nodes:
        _choose_nodes(run_dir, attempt, counts or [len(nodes)], down)
        _create_logs(logs, settings)
    return attempt


def _claim(run_dir: Path, job: str) -> int:
    """Create the file with the job's id in the logs of the next attempt, and return its number.

    That is the newest one if only its submission has written there.
    """
    own_folder(run_dir / LOGS)
    attempt = max(attempt_numbers(run_dir), default=0)
    while True:
        logs = own_folder(attempt_logs(run_dir, attempt))
        if set(names_in(logs)) <= {CONFIG, RECORD}:
            with suppress(FileExistsError), open_new(logs / JOB) as file:
                file.write(f"{job}\n".encode())
                return attempt
        attempt += 1


def _keep_last_attempt(run_dir: Path, attempt: int) -> None:
    """Move what the attempt before has left in the run directory to its logs, and remove its markers."""
    for name in (RESULT, f"{LOGS}/{FIRST_STEP}"):
        if os.path.lexists(run_dir / name):
            kept = own_folder(attempt_logs(run_dir, max(attempt - 1, 0))) / Path(name).name
            if os.path.lexists(kept):
                set_aside(kept, "in the way of a newer one")
            (run_dir / name).replace(kept)
    if (run_dir / RESTART).is_file():
        create_marker(attempt_logs(run_dir, attempt) / RESTARTED)
    for marker in (REQUEUE, RESTART):
        _remove_marker(run_dir / marker)


def _remove_marker(path: Path) -> None:
    keep_only_file(path)
    path.unlink(missing_ok=True)


def _requeues(attempts: Sequence[JobAttempt]) -> int:
    """Return how often the scheduler has started a job again, by its attempts."""
    return max(sum(not attempt.restarted for attempt in attempts) - 1, 0)


def _check_limits(run_dir: Path, attempt: int, cluster: ClusterConfig | None, *, limit_requeues: bool = False) -> None:
    """Apply the limits to the attempts before one that begins: a scheduler may requeue a job by itself.

    Raises Refused, after writing result.json, if a limit is reached.
    """
    attempts = attempts_of_job(run_dir, attempt)[:-1]
    requeues = _requeues(attempts) if attempts and limit_requeues else None
    reason = reason_to_end(cluster, attempts, requeues=requeues)
    if reason is not None:
        record_result(run_dir, {"status": "failed", "error": f"not restarted: {reason}"})
        raise Refused(f"not restarted: {reason}")


def _choose_nodes(run_dir: Path, attempt: int, counts: Sequence[int], down: Sequence[str]) -> None:
    """Write the nodes to use to the attempt's logs, or request a requeue if too few of them are left.

    A node that failed in two attempts of the job is not used, unless the job was requeued for others and got it again.
    """
    logs = attempt_logs(run_dir, attempt)
    numbers = attempt_numbers(run_dir, job_of_attempt(run_dir, attempt))
    earlier = [attempt_logs(run_dir, number) for number in numbers if number < attempt]
    if earlier:
        _record_down_nodes(earlier[-1], down)
    failures = Counter(node for each in earlier for node in lines_of(each / _FAILED_NODES))
    failing = {node for node, count in failures.items() if count >= _FAILURES}
    if earlier and (earlier[-1] / _LEFT_OUT_NODES).exists():
        failing = set()  # another requeue would not help: the scheduler allocated them again
    allocated = lines_of(logs / _NODES)
    usable = [node for node in allocated if node not in failing]
    left_out = [node for node in allocated if node in failing]
    fitting = [count for count in counts if count <= len(usable)]
    if not fitting:
        print_text(
            f"{', '.join(left_out)} failed in {_FAILURES} attempts: requeuing the job for other nodes", flush=True
        )
        atomic_write(logs / _LEFT_OUT_NODES, _as_lines(left_out), PRIVATE)
        atomic_write(run_dir / REQUEUE, _as_lines(left_out))
        return
    used = usable[: max(fitting)]
    if left_out:
        print_text(f"starting without {', '.join(left_out)}, which failed in {_FAILURES} attempts", flush=True)
    if idle := usable[len(used) :]:
        print_text(f"{', '.join(idle)} stay idle: the run can use {' or '.join(map(str, counts))} nodes", flush=True)
    if len(used) < len(allocated):
        atomic_write(logs / _NODES, _as_lines(used), PRIVATE)


def _record_down_nodes(logs: Path, down: Sequence[str]) -> None:
    """Print which nodes of an earlier attempt are down now, and record that they failed in it."""
    used = lines_of(logs / _NODES)
    entries = [entry for entry in dict.fromkeys(down) if entry.partition("|")[0] in used]
    for entry in entries:
        node, state, reason = (*entry.split("|", 2), "", "")[:3]
        print_text(f"node {node} of the previous attempt is {state}: {reason}", flush=True)
    _record_failed_nodes(logs, [entry.partition("|")[0] for entry in entries])


def _record_failed_nodes(logs: Path, nodes: Iterable[str]) -> None:
    """Record in an attempt's logs that nodes failed in it; a node is left out after `_FAILURES` such attempts."""
    names = list(dict.fromkeys([*lines_of(logs / _FAILED_NODES), *filter(None, nodes)]))
    if names:
        atomic_write(logs / _FAILED_NODES, _as_lines(names), PRIVATE)


def _create_logs(logs: Path, cluster: ClusterConfig | None) -> None:
    """Create the logs of all ranks, so that they are for the owner only, whatever the umask of who writes to them."""
    if cluster is None or not cluster.procs_per_node.isdecimal():
        return
    nodes = len(lines_of(logs / _NODES))
    by_agent = cluster.launcher == Launcher.torchrun
    files = [logs / f"node_{node}.log" for node in range(nodes)]
    for file in files if by_agent else [log_file(logs, rank) for rank in range(nodes * int(cluster.procs_per_node))]:
        open_append(file, PRIVATE).close()


def conclude(run_dir: Path, attempt: int, ended: Ended) -> int:
    """Print and record the outcome of an attempt, decide what follows, and return the exit status of the job."""
    _remove_marker(run_dir / RESTART)
    keep_only_file(run_dir / REQUEUE)
    status = _Conclusion(run_dir, attempt, ended).conclude()
    if (run_dir / REQUEUE).exists():
        _exclude_nodes(run_dir, attempt, ended)
    return status


class _Conclusion:
    """The end of one attempt."""

    def __init__(self, run_dir: Path, attempt: int, ended: Ended) -> None:
        self.run_dir, self.attempt, self.ended = run_dir, attempt, ended
        self.logs = attempt_logs(run_dir, attempt)
        self.cluster = cluster_of(run_dir)
        self.cancelled = ended.cancelled or (self.logs / CANCELLED).exists()

    def conclude(self) -> int:
        reports, result = read_reports(self.logs), read_result(self.run_dir)
        exits = [RankExit(rank, 1, report.time, terminated=False) for rank, report in reports.items()]
        failure = first_failure(exits, reports)
        if self.cancelled and result.get("status") != "ok" and (failure is None or _lost_peer(failure)):
            (self.run_dir / REQUEUE).unlink(missing_ok=True)
            record_result(self.run_dir, {**result, "status": "cancelled"})
            print_text("cancelled", flush=True)
            return self.ended.status or 1
        crashed = cause_of(failure, self._was_killed()) == "crash" and not result
        status = self._stopped() if failure is None else self._failed(failure)
        if self.ended.seconds_left is not None and not self.cancelled:
            if crashed:
                self._restart(failure, self.ended.seconds_left)
                return status
            if failure is None and self._could_not_restart():
                self._requeue("the ranks could not be started again")
                return status
        if failure is not None or not (self.run_dir / REQUEUE).exists():
            return status
        if reason := self._reason_to_end():
            (self.run_dir / REQUEUE).unlink()
            print_text(f"stopped, but not requeued: {reason}; submit the same command again", flush=True)
            return status or 1
        print_text("stopped: requeuing the job", flush=True)
        return status

    @property
    def attempts(self) -> list[JobAttempt]:
        """The attempts of the job up to this one, as they are recorded now."""
        return attempts_of_job(self.run_dir, self.attempt)

    def _reason_to_end(self, after: str | None = None) -> str | None:
        """Return why the job must not be requeued; None if it may be."""
        attempts = self.attempts
        requeues = _requeues(attempts)
        excludes = self.ended.up is not None
        return reason_to_end(self.cluster, attempts, after=after, requeues=requeues, excludes_nodes=excludes)

    def _stopped(self) -> int:
        """Return the exit status of an attempt without a failed rank, and write result.json if no rank did."""
        result, status = read_result(self.run_dir), self.ended.status
        if result:
            print_text(result["status"], flush=True)
            # A run that stopped on request has not failed, although torchrun's agents exit with status 1; neither has
            # one that received the request while its processes were exiting.
            return 0 if result["status"] in ("preempted", "interrupted") or status == _STOPPED_EARLY else status
        if status == _STOPPED_EARLY or self._agents_were_stopped():
            record_result(self.run_dir, {"status": "preempted", "error": "stopped before training started"})
            create_marker(self.run_dir / REQUEUE)
            return 0
        if status:
            see = f"see the output of the job and {self.logs}"
            reason = f"the ranks ended with status {status}, and none reported an error; {see}"
            record_result(self.run_dir, {"status": "failed", "error": reason})
            print_text(reason, flush=True)
        return status

    def _agents_were_stopped(self) -> bool:
        """Return whether the stop request ended torchrun's agents, by their logs: their exit status is always 1."""
        line = f"got signal: {signal.SIGUSR2:d}"
        return any(line in read_text(log) for log in self.logs.glob("node_*.log"))

    def _was_killed(self) -> bool:
        """Return whether a rank was killed by a signal, by the exit status of the ranks' parent or torchrun's logs."""
        by_agents = any(_KILLED_BELOW_AGENT.search(read_text(log)) for log in self.logs.glob("node_*.log"))
        return by_agents or (self.ended.status > 128 and self.ended.status != _STOPPED_EARLY)

    def _restart(self, failure: Failure | None, seconds_left: float) -> None:
        """Request a new start of the ranks in this job, or a requeue if its time limit is near, or print why not."""
        if failure is not None and failure.report is not None and failure.report.is_gpu_error:
            _record_failed_nodes(self.logs, [failure.report.node])
        attempts = self.attempts
        lead = None if self.cluster is None else self.cluster.signal_lead_seconds
        if any(attempt.stepped for attempt in attempts) and not attempts[-1].stepped:
            self._requeue("the ranks could not be started")  # a node may be lost, which a scheduler notices later
        elif reason := reason_to_end(self.cluster, attempts, after="crash", requeues=None):
            print_text(f"the ranks are not started again: {reason}", flush=True)
        elif lead is not None and seconds_left < lead + _START_MARGIN:  # the stop signal might be missed
            self._requeue("the time limit is near")
        else:
            create_marker(self.run_dir / RESTART)
            print_text("starting the ranks again in this job", flush=True)

    def _could_not_restart(self) -> bool:
        """Return whether an attempt after a crash failed before its first step."""
        last = self.attempts[-2:]
        crashed = all(each.status in LIMITS["crash"].statuses for each in last)
        return len(last) == 2 and crashed and not last[1].stepped

    def _requeue(self, why: str) -> None:
        """Request a requeue of the job, or print why not."""
        if reason := self._reason_to_end():
            print_text(f"{why}, and the job is not requeued: {reason}", flush=True)
        else:
            create_marker(self.run_dir / REQUEUE)
            print_text(f"{why}: requeuing the job", flush=True)

    def _failed(self, failure: Failure) -> int:
        """Print and record the failure of an attempt, and return the exit status of the job.

        A hung run, and one in which a rank computes wrong numbers, are requeued without the faulty nodes.
        """
        report, run_dir = failure.report, self.run_dir
        if _lost_peer(failure):
            ranks, reports = range(sum(1 for _ in self.logs.glob("rank_*.log"))), read_reports(self.logs)
            silent = ", ".join([str(rank) for rank in ranks if rank not in reports][:8])
            which = f" rank {silent} reported nothing: killed, or exited with status 0{LEFT_EARLY};" if silent else ""
            see = "see the messages above for the rank that ended first"
            print_text(f"every failed rank reports only a lost peer;{which} {see}", flush=True)
        if report is None or report.kind != Kind.in_use:
            (run_dir / REQUEUE).unlink(missing_ok=True)
        if report is not None and report.is_config:
            print_failure(failure, self.logs)
            if report.kind == Kind.config and not refuse_start(run_dir, self.attempt):
                record_result(run_dir, {"status": "invalid", "error": report.message})
            return EXIT_INVALID
        record_result(run_dir, {"status": report.status if report else "failed", "error": failure.error})
        if report is None or not report.kind.names_ranks:
            print_failure(failure, self.logs)
            return self.ended.status or 1
        what = {Kind.hung: "the run hung", Kind.corrupted: "a rank computed wrong numbers"}[report.kind]
        reason = self._reason_to_end(cause_of(failure, killed=False))
        if reason is None and not self.cancelled:
            atomic_write(run_dir / REQUEUE, _as_lines(report.faulty_hosts))
            print_text(f"{what}: requeuing the job", flush=True)
        elif not self.cancelled:
            print_text(f"{what}, and the job is not requeued: {reason}", flush=True)
        print_failure(failure, self.logs)
        return report.kind.exit_status


def _exclude_nodes(run_dir: Path, attempt: int, ended: Ended) -> None:
    """Replace the faulty nodes in RUN/requeue by all nodes that the job must exclude, if it fits on the others.

    An exclusion that leaves too few nodes would keep the job pending forever.
    """
    logs, settings, excluded = attempt_logs(run_dir, attempt), cluster_of(run_dir), list[str]()
    used = [*lines_of(logs / _NODES), *lines_of(logs / _LEFT_OUT_NODES)]
    faulty = [node for node in dict.fromkeys(lines_of(run_dir / REQUEUE)) if node in used]
    if ended.up is None or settings is None:
        return
    names = " ".join(faulty)
    if faulty and (settings.nodelist or settings.reservation):
        print_text(
            f"to be requeued on any node, also {names}: cluster.nodelist or cluster.reservation limits the choice",
            flush=True,
        )
    elif faulty:
        excluded = sorted({*ended.excluded, *faulty})
        left = {node for node in _with_feature(ended.up, settings.constraint) if node not in excluded}
        if len(left) >= settings.fewest_nodes:
            print_text(f"to be requeued without {names}, where a rank failed", flush=True)
        else:
            reason = f"too few nodes that the job can use are up without {names}"
            print_text(f"to be requeued on any node: {reason}", flush=True)
            excluded = []
    atomic_write(run_dir / REQUEUE, _as_lines(excluded))


def _with_feature(up: Sequence[str], constraint: str | None) -> list[str]:
    """Return the nodes with the feature of cluster.constraint; none for an expression of several features."""
    nodes = [each.partition("|") for each in up]
    return [node for node, _, features in nodes if constraint is None or constraint in features.split(",")]


def _lost_peer(failure: Failure | None) -> bool:
    return failure is not None and failure.report is not None and failure.report.kind == Kind.lost_peer


def _as_lines(entries: Iterable[str]) -> str:
    return "".join(f"{entry}\n" for entry in entries)


def seconds_left(text: str) -> float:
    """Return the time left of a job's limit, in Slurm's notation, in seconds; infinite for text that is not a time."""
    seconds = seconds_of(text)
    return float("inf") if seconds is None else seconds
