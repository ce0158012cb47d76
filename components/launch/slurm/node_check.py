"""`python -m components.launch.slurm.node_check RUN_DIR GPUS`, for templates that were copied before
`components.launch.job check` existed."""

from __future__ import annotations

import sys

from components.launch.job.__main__ import run_command

if __name__ == "__main__":
    sys.exit(run_command(["check", *sys.argv[1:]]))
