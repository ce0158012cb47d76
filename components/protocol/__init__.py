"""Protocol between the launcher and the ranks. Imports neither torch nor Hydra.

role.py        environment variables; the role of this process (launcher, worker, attached), its rank, node and job
run_files.py   names of the files in a run directory; atomic writes, locks, and handling of damaged files
loopback.py    a reserved port for the store of ranks on one machine
signals.py     signals that request a save and a stop
exit_codes.py  exit statuses
console_log.py  a copy of the console in a rank's log
failures.py    error reports of failed ranks, and the choice of the root cause among them
"""
