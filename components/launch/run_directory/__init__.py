"""The run directory: creation, protection against concurrent runs, and contents at the start. Imports no torch.

opening.py    choose, lock and validate a run directory; config changes since the run began: reported, or rejected
directory.py  the directory of one attempt: folders, frozen config, environment.json, removal of a rejected start
lease.py      a lease that admits one training run per directory, across machines
"""
