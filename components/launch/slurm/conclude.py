"""`python -m components.launch.slurm.conclude RUN_DIR ATTEMPT STATUS`, for templates that were copied before
`components.launch.job` existed. Afterwards RUN_DIR/requeue lists the faulty nodes; the script excludes them."""

from __future__ import annotations

import os
import sys

from components.launch.job.__main__ import run_command
from components.protocol.role import ATTEMPT

if __name__ == "__main__":
    run_dir, os.environ[ATTEMPT], *others = sys.argv[1:]
    renamed = ["--left" if each == "--restart-if-left" else each for each in others]
    requeues = os.environ.get("SLURM_RESTART_COUNT") or "0"
    sys.exit(run_command(["conclude", run_dir, *renamed, "--requeues", requeues]))
