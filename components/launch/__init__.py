"""Launching of recipes, from the command line to running ranks: `@recipe("name")` on a main. Imports no torch.

recipe.py         the decorator, and the dispatch by process role
open_run.py       compose and validate the config, create the run directory
run_checks.py     the fast, read-only checks that all backends share
hub_access.py     availability of the Hugging Face models and datasets of a run
memory_report.py  estimated memory of a run on its device
machine.py        cores, GPUs and memory of this machine, and the number of processes
backend.py        the backend interface and its data types
clusters.py       the backend of each cluster.kind
local.py          the local backend: start, monitor and stop ranks on this machine
slurm/            the Slurm backend
k8s/              the Kubernetes backend
schedulers/       what the backends of both schedulers share
sweep/            -m: many runs from one command line, reported in one table
attached.py       ranks started by the user's own torchrun or srun
rank.py           main on one rank, and its failure report
run_directory/    choose, validate, lock and populate the run directory
"""

from components.launch.recipe import recipe

__all__ = ["recipe"]
