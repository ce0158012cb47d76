"""What the launcher and the ranks agree on. Imports neither torch nor Hydra.

role.py        environment variables, the role of this process (launcher, worker, attached), its rank, node and job
run_files.py   names of the files in a run directory; atomic writes, locks, reading what may be damaged
signals.py     signals that ask a run to save and stop
exit_codes.py  exit statuses
failures.py    the report that a failed rank writes, and which rank failed first
"""
