"""Before the ranks of an attempt start: `python -m components.launch.slurm.attempt_start RUN_DIR ATTEMPT COUNT...`.

Checks the limits on requeues, crashes, hangs, corruption and attempts without progress, since Slurm requeues a job by
itself if its node failed or its grace time was too short; `conclude` applies the same limits at the end of an attempt.
Then chooses the nodes: those of the job without the ones that failed in two attempts, as many as the largest COUNT, the
numbers of nodes that the run can use. If too few are left, the marker RUN_DIR/requeue requests other nodes. Exits with
status 1 if the job must end.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from components.launch.scheduled_jobs import (
    JobAttempt,
    Remedies,
    attempt_numbers,
    attempts_of_job,
    lack_of_progress,
    requeue_policy,
)
from components.protocol.failures import Kind
from components.protocol.role import whole_number
from components.protocol.run_files import PRIVATE, REQUEUE, atomic_write, attempt_logs, read_text, record_result
from components.terminal import keep_running, open_output, print_text

NODES, FAILED_NODES, LEFT_OUT_NODES = "nodes", "failed_nodes", "left_out_nodes"
"""Files in an attempt's logs with one node per line: the nodes of its ranks, those of them that failed, and those
because of which the job was requeued before the ranks started."""
_DOWN_NODES = "down_nodes"
"""File in an attempt's logs with lines NODE|STATE|REASON of sinfo: its nodes that are down as the next one begins."""
_FAILURES = 2
"""Number of attempts in which a node may fail before it is no longer used."""
CRASHED = ("failed", "oom")
"""Statuses of attempts after which the ranks of a job may be started again."""
_REMEDIES = Remedies(
    longer_save="cluster.signal_lead_seconds, GraceTime of the partition",
    longer_attempt="raise cluster.time, choose a partition that is preempted less",
)


def start_attempt(run_dir: Path, attempt: int, counts: Sequence[int]) -> int:
    """Check the limits on attempts and choose the nodes of an attempt; return 1 if the job must end, else 0.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt, in whose logs the batch script has listed the nodes of the job.
        counts: Numbers of nodes that the run can use, in order.
    """
    reason = lack_of_progress(run_dir, attempts_of_job(run_dir, attempt)[:-1], _REMEDIES)
    if reason is not None:
        print_text(f"not restarted: {reason}", flush=True)
        record_result(run_dir, {"status": "failed", "error": reason})
        return 1
    numbers = attempt_numbers(run_dir, attempt)[:-1]
    earlier = [attempt_logs(run_dir, number) for number in numbers]
    if numbers:
        _report_down_nodes(run_dir, numbers[-1])
    failures = Counter(node for logs in earlier for node in _lines_of(logs / FAILED_NODES))
    failing = {node for node, count in failures.items() if count >= _FAILURES}
    if earlier and (earlier[-1] / LEFT_OUT_NODES).exists():  # the job was requeued for other nodes and got the same
        failing = set()
    logs = attempt_logs(run_dir, attempt)
    if not _lines_of(logs / NODES):
        print_text(f"{logs / NODES}: lists no node; compare cluster.template with slurm/train.sbatch.j2", flush=True)
        return 1
    _choose_nodes(run_dir, logs, counts, failing)
    return 0


def _choose_nodes(run_dir: Path, logs: Path, counts: Sequence[int], failing: set[str]) -> None:
    """Write the nodes to use to the attempt's logs, or request a requeue if too few of them are not `failing`."""
    allocated = _lines_of(logs / NODES)
    usable = [node for node in allocated if node not in failing]
    left_out = [node for node in allocated if node in failing]
    if not any(count <= len(usable) for count in counts):
        print_text(
            f"{', '.join(left_out)} failed in {_FAILURES} attempts: requeuing the job for other nodes", flush=True
        )
        atomic_write(logs / LEFT_OUT_NODES, _as_lines(left_out), PRIVATE)
        atomic_write(run_dir / REQUEUE, _as_lines(left_out))
        return
    used = usable[: max(count for count in counts if count <= len(usable))]
    if left_out:
        print_text(f"starting without {', '.join(left_out)}, which failed in {_FAILURES} attempts", flush=True)
    if idle := usable[len(used) :]:
        print_text(f"{', '.join(idle)} stay idle: the run can use {' or '.join(map(str, counts))} nodes", flush=True)
    if len(used) < len(allocated):
        atomic_write(logs / NODES, _as_lines(used), PRIVATE)


def record_failed_nodes(run_dir: Path, attempt: int, nodes: Iterable[str]) -> None:
    """Record that nodes failed in an attempt; a node is left out after `_FAILURES` such attempts of a job."""
    file = attempt_logs(run_dir, attempt) / FAILED_NODES
    names = list(dict.fromkeys([*_lines_of(file), *nodes]))
    if names:
        atomic_write(file, _as_lines(names), PRIVATE)


def _lines_of(file: Path) -> list[str]:
    """Return the lines of a file; none if it does not exist."""
    return read_text(file).splitlines()


def _report_down_nodes(run_dir: Path, attempt: int) -> None:
    """Print which nodes of an earlier attempt are down now, and record that they failed in it."""
    down = [line.split("|", 2) for line in _lines_of(attempt_logs(run_dir, attempt) / _DOWN_NODES)]
    for node, state, why in down:
        print_text(f"node {node} of the previous attempt is {state}: {why}", flush=True)
    record_failed_nodes(run_dir, attempt, (node for node, _, _ in down))


def _as_lines(nodes: Iterable[str]) -> str:
    return "".join(f"{node}\n" for node in nodes)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("counts", type=int, nargs="+")
    given = parser.parse_args()
    return start_attempt(given.run_dir, given.attempt, given.counts)


def reason_to_stop(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job must not be requeued after these attempts, naming the limit; None if it may be."""
    limit = requeue_policy(run_dir).max
    if (whole_number(environ.get("SLURM_RESTART_COUNT", "")) or 0) >= limit:
        return f"the limit of {limit} requeues is reached (cluster.requeue.max)"
    return lack_of_progress(run_dir, attempts, _REMEDIES)


def reason_not_after_hang(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job whose last attempt hung must not be requeued; None if it may be."""
    limit = requeue_policy(run_dir).hang
    if limit == 0:
        return "a run that hung is not requeued (cluster.requeue.hang=0)"
    if sum(attempt.status == Kind.hung for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after a hang is reached (cluster.requeue.hang)"
    if not any(attempt.stepped for attempt in attempts):
        return "the run hung before its first step, so it would likely hang again"
    return reason_to_stop(run_dir, attempts, environ)


def reason_not_after_crash(run_dir: Path, attempts: list[JobAttempt]) -> str | None:
    """Return why the ranks must not be started again after one of them crashed; None if they may be."""
    limit = requeue_policy(run_dir).crash
    if limit == 0:
        return "ranks that crashed are not started again (cluster.requeue.crash=0)"
    if sum(attempt.status in CRASHED for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} starts after a crash is reached (cluster.requeue.crash)"
    if not attempts or not attempts[-1].stepped:
        return "the rank crashed before the first step, so it would likely crash again"
    return lack_of_progress(run_dir, attempts, _REMEDIES)


def reason_not_after_corruption(run_dir: Path, attempts: list[JobAttempt], environ: Mapping[str, str]) -> str | None:
    """Return why a job in whose last attempt a rank computed wrong numbers must not be requeued; None if it may be.

    Unlike after a hang, the attempt need not have taken a step: the requeued job runs on other nodes.
    """
    limit = requeue_policy(run_dir).corruption
    if limit == 0:
        return "a run with a rank that computes wrong numbers is not requeued (cluster.requeue.corruption=0)"
    if sum(attempt.status == Kind.corrupted for attempt in attempts[:-1]) >= limit:
        return f"the limit of {limit} requeues after wrong numbers is reached (cluster.requeue.corruption)"
    return reason_to_stop(run_dir, attempts, environ)


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(_main())
