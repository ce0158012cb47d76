"""The run directory: creation, protection against concurrent runs, and contents at the start. Imports no torch.

opening.py       choose, lock and validate a run directory; exclude other starts from one
directory.py     the directory of one attempt: freeze the config, conclude the run, discard a rejected start
filesystem.py    create folders with their parents; report file system errors as config errors
lease.py         a lease that admits one training run per directory, across machines
resume_check.py  config changes since the run began: reported, or rejected
provenance.py    environment.json: versions, git, command, host
"""
