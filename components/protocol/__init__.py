"""What the launcher and the ranks agree on. Imports neither torch nor Hydra.

role.py       environment variables, and by them the role of this process: launcher, rank, rank of another launcher
run_files.py  names in a run directory, and files that are written whole or not at all
failures.py   the report that a failed rank leaves, and which rank failed first
"""
