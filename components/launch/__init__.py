"""From a command line to ranks: `@recipe("name")` on a recipe's main. Imports no torch.

recipe.py         the decorator, and what happens when main() is called
preflight.py      everything that can be checked before a run starts
processes.py      how many processes a run has
run_directory.py  chosen once, guarded, locked; config.yaml and result.json
folders.py        made with their parents, or only looked at
lease.py          one rank 0 trains in a run directory at a time, on whichever machine
files.py          written whole, read, locked
record.py         environment.json: versions, git, command, host
rank.py           main on one rank, and what is kept of its failure
local.py          start local ranks, watch them, stop them
memory.py         whether memory ran out
sweep/            -m: many runs from one command line, and one table of them
external.py       ranks that the user's own torchrun or srun started
parts.py          the two functions of other parts that launch calls
"""

from components.launch.recipe import recipe

__all__ = ["recipe"]
