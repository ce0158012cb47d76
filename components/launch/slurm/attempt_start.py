"""Before the ranks of an attempt start: `python -m components.launch.slurm.attempt_start RUN_DIR ATTEMPT COUNT...`.

Checks the limits on attempts, since Slurm requeues a job by itself if its node failed or its grace time was too short.
Then chooses the nodes: those of the job without the ones that failed in two attempts, as many as the largest COUNT, the
numbers of nodes that the run can use. If too few are left, the marker RUN_DIR/requeue requests other nodes. Exits with
status 1 if the job must end.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from components.launch.schedulers.job_attempts import attempt_numbers, attempts_of_job, lack_of_progress
from components.launch.slurm.requeue import REMEDIES
from components.protocol.run_files import PRIVATE, REQUEUE, atomic_write, attempt_logs, read_text, record_result
from components.terminal import keep_running, open_output, print_text

NODES, FAILED_NODES, LEFT_OUT_NODES = "nodes", "failed_nodes", "left_out_nodes"
"""Files in an attempt's logs with one node per line: the nodes of its ranks, those of them that failed, and those
because of which the job was requeued before the ranks started."""
DOWN_NODES = "down_nodes"
"""File in an attempt's logs with lines NODE|STATE|REASON of sinfo: its nodes that are down as the next one begins."""
FAILURES = 2
"""Number of attempts in which a node may fail before it is no longer used."""


def start_attempt(run_dir: Path, attempt: int, counts: Sequence[int]) -> int:
    """Check the limits on attempts and choose the nodes of an attempt; return 1 if the job must end, else 0.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt, in whose logs the batch script has listed the nodes of the job.
        counts: Numbers of nodes that the run can use, in order.
    """
    reason = lack_of_progress(run_dir, attempts_of_job(run_dir, attempt)[:-1], REMEDIES)
    if reason is not None:
        print_text(f"not restarted: {reason}", flush=True)
        record_result(run_dir, {"status": "failed", "error": reason})
        return 1
    numbers = attempt_numbers(run_dir, attempt)[:-1]
    earlier = [attempt_logs(run_dir, number) for number in numbers]
    if numbers:
        _report_down_nodes(run_dir, numbers[-1])
    failures = Counter(node for logs in earlier for node in lines_of(logs / FAILED_NODES))
    failing = {node for node, count in failures.items() if count >= FAILURES}
    if earlier and (earlier[-1] / LEFT_OUT_NODES).exists():  # the job was requeued for other nodes and got the same
        failing = set()
    logs = attempt_logs(run_dir, attempt)
    if not lines_of(logs / NODES):
        print_text(f"{logs / NODES}: lists no node; compare cluster.template with slurm/train.sbatch.j2", flush=True)
        return 1
    _choose_nodes(run_dir, logs, counts, failing)
    return 0


def _choose_nodes(run_dir: Path, logs: Path, counts: Sequence[int], failing: set[str]) -> None:
    """Write the nodes to use to the attempt's logs, or request a requeue if too few of them are not `failing`."""
    allocated = lines_of(logs / NODES)
    usable = [node for node in allocated if node not in failing]
    left_out = [node for node in allocated if node in failing]
    if not any(count <= len(usable) for count in counts):
        print_text(
            f"{', '.join(left_out)} failed in {FAILURES} attempts: requeuing the job for other nodes", flush=True
        )
        atomic_write(logs / LEFT_OUT_NODES, _as_lines(left_out), PRIVATE)
        atomic_write(run_dir / REQUEUE, _as_lines(left_out))
        return
    used = usable[: max(count for count in counts if count <= len(usable))]
    if left_out:
        print_text(f"starting without {', '.join(left_out)}, which failed in {FAILURES} attempts", flush=True)
    if idle := usable[len(used) :]:
        print_text(f"{', '.join(idle)} stay idle: the run can use {' or '.join(map(str, counts))} nodes", flush=True)
    if len(used) < len(allocated):
        atomic_write(logs / NODES, _as_lines(used), PRIVATE)


def record_failed_nodes(run_dir: Path, attempt: int, nodes: Iterable[str]) -> None:
    """Record that nodes failed in an attempt; a node is left out after `FAILURES` such attempts of a job."""
    file = attempt_logs(run_dir, attempt) / FAILED_NODES
    names = list(dict.fromkeys([*lines_of(file), *nodes]))
    if names:
        atomic_write(file, _as_lines(names), PRIVATE)


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file; none if it does not exist."""
    return read_text(file).splitlines()


def _report_down_nodes(run_dir: Path, attempt: int) -> None:
    """Print which nodes of an earlier attempt are down now, and record that they failed in it."""
    down = [line.split("|", 2) for line in lines_of(attempt_logs(run_dir, attempt) / DOWN_NODES)]
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


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(_main())
