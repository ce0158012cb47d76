"""From a command line to ranks: `@recipe("name")` on a recipe's main. Imports no torch.

recipe.py       the decorator, and what happens when main() is called
open_run.py     compose, check, create the run directory
run_checks.py   every check that needs milliseconds and writes nothing
hub_access.py   whether what a run needs from the Hugging Face hub is cached or reachable
machine.py      cores, GPUs and memory of this machine, and the number of processes
backend.py      the interface of a backend, and the values it works with
clusters.py     the backend of each cluster.kind
local.py        the local backend: start ranks on this machine, watch them, stop them
slurm/          the Slurm backend
sweep/          -m: many runs from one command line, and one table of them
attached.py     ranks that the user's own torchrun or srun started
rank.py         main on one rank, and the record of its failure
run_directory/  choose, guard, lock and fill the run directory
"""

from components.launch.recipe import recipe

__all__ = ["recipe"]
