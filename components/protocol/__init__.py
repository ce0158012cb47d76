"""Protocol between the launcher and the ranks: variables, files, signals, errors. Imports neither torch nor Hydra.

processes.py    environment variables; role (launcher, worker, attached), rank, node and job of a process; its signals
run_files.py    names of the files in a run directory; atomic writes, locks, and handling of damaged files
errors.py       ConfigError, checks of values, and the exit statuses
failures.py     error reports of failed ranks, and the choice of the root cause among them; frames of running threads
console_log.py  a copy of the console in a rank's log
secrets.py      detection of secrets, which no file or message may contain
safe_parsing.py JSON and YAML with limits, for files of users and other programs
"""
