"""`python -m components.launch.slurm.attempt_start RUN_DIR ATTEMPT COUNT...`, for batch scripts that claim attempts.

Such a template (`cluster.template`) was copied before `components.launch.job` existed. It has listed the nodes of the
job in the logs of the attempt, and those of the previous attempt that are down in the logs of that one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from components.launch.job.attempts import NODES, Refused, check_limits, choose_nodes
from components.launch.job.policy import cluster_of, lines_of
from components.protocol.run_files import attempt_logs
from components.terminal import keep_running, open_output, print_text


def start_attempt(run_dir: Path, attempt: int, counts: list[int]) -> int:
    """Check the limits on attempts and choose the nodes of an attempt; return 1 if the job must end, else 0."""
    nodes = attempt_logs(run_dir, attempt) / NODES
    try:
        check_limits(run_dir, attempt, cluster_of(run_dir))
        if not lines_of(nodes):
            raise Refused(f"{nodes}: lists no node; compare cluster.template with slurm/train.sbatch.j2")
    except Refused as reason:
        print_text(reason, flush=True)
        return 1
    down = lines_of(attempt_logs(run_dir, attempt - 1) / "down_nodes")
    choose_nodes(run_dir, attempt, counts, down)
    return 0


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(start_attempt(Path(sys.argv[1]), int(sys.argv[2]), [int(count) for count in sys.argv[3:]]))
