"""Sweeps (`-m`): many runs from one command line, reported in one table. Imports no torch.

command.py  expand, check and start a command line with -m
plan.py     the sweep's folder: sweep.json, a record per point, the lock; the state of each point
points.py   the loop that runs or retries the points, each in a child process with its share of this machine
study.py    the Optuna study that chooses points one by one (sweep.trials)
ranking.py  what makes a point the best one, points that train the same curve or are stopped early; the table
report.py   the report on the console and as files, sweep.png, and the exit status
"""
