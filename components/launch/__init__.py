"""Launching of recipes, from the command line to running ranks: `@recipe("name")` on a main. Imports no torch.

recipe.py          the decorator; it starts main as a rank (rank.py) or through the launcher (start.py)
start.py           what a command line does: an answer, a sweep, or a run
overrides.py       command lines with parallelism=auto, parallelism=plan:K and run=RUN
open_run.py        compose and validate the config, create the run directory; ranks of the user's own torchrun or srun
run_checks.py      the read-only checks that all backends share: files, hub access, estimated memory
machine.py         cores, GPUs and health of this machine, the number of processes, run.deterministic's variables
backend.py         the backend interface and its data types
clusters.py        the backend of each cluster.kind, and the jobs of all schedulers
local.py           the local backend: start, monitor and stop ranks on this machine
job/               runs as jobs: submission, attempts, limits on new starts
slurm/             the Slurm scheduler
k8s/               the Kubernetes scheduler
sweep/             -m: many runs from one command line, reported in one table
rank.py            main on one rank, and its failure report
run_directory.py   the directory of one attempt: folders, frozen config, environment.json, removal of a rejected start
run_directory_lock.py   choose, lock and validate a run directory; config changes since the run began
run_directory_lease.py  a lease that admits one training run per directory, across machines
"""

from components.launch.recipe import recipe

__all__ = ["recipe"]
