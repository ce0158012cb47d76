"""The run directory, as a launcher chooses, guards and fills it, and as rank 0 holds it. Imports no torch.

opening.py       choose, lock and guard a run directory; keep other starts out of one
directory.py     the directory of one attempt: freeze the config, conclude the run, discard a rejected start
filesystem.py    create folders with their parents; errors of the file system as config errors
lease.py         at most one rank 0 trains in a run directory, on whichever machine
resume_check.py  what changed in the config since the run began, and what may not
provenance.py    environment.json: versions, git, command, host
"""
