"""Checks that run on every node before the ranks start: `python -m components.launch.slurm.node_check RUN_DIR GPUS`."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from components.launch.scheduled_jobs import node_problems
from components.protocol.run_files import REQUEUE, create_marker
from components.terminal import keep_running, open_output, print_text


def check_node() -> int:
    """Print one line per problem of this node; return 1 if there is any, else 0."""
    run_dir, gpus = Path(sys.argv[1]), int(sys.argv[2])
    # The stop request: there is nothing to save yet, so only leave the marker for the batch script.
    signal.signal(signal.SIGUSR2, lambda number, frame: create_marker(run_dir / REQUEUE))
    problems = node_problems(run_dir, gpus)
    for problem in problems:
        print_text(f"node {socket.gethostname()}: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(check_node())
