"""`python -m components.launch.slurm.conclude RUN_DIR ATTEMPT STATUS`, for templates that were copied before
`components.launch.job` existed. Afterwards RUN_DIR/requeue lists the faulty nodes; the script excludes them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from components.launch.job.attempts import Ended, conclude, seconds_left
from components.protocol.processes import whole_number
from components.terminal import keep_running, open_output


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("status", type=int)
    parser.add_argument("--restart-if-left", metavar="TIME")
    parser.add_argument("--cancelled", action="store_true")
    given = parser.parse_args()
    left = None if given.restart_if_left is None else seconds_left(given.restart_if_left)
    requeues = whole_number(os.environ.get("SLURM_RESTART_COUNT", "")) or 0  # such a script records no restarts
    return conclude(given.run_dir, given.attempt, Ended(given.status, given.cancelled, left, requeues))


if __name__ == "__main__":
    open_output()
    keep_running()
    sys.exit(_main())
