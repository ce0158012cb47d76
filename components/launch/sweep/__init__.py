"""Sweeps (`-m`): many runs from one command line, reported in one table. Imports no torch.

command.py        expand, check and start a command line with -m
plan.py           the sweep's folder: sweep.json, a record per point, the lock
points.py         the loop that runs or retries the points
shares.py         the share of this machine of each of several points that run at the same time
point_process.py  the launcher of one point in a child process
study.py          the Optuna study that chooses points one by one (sweep.trials)
point_rows.py     the state of each point, from its files and its job
losses.py         comparison of the losses of points that should train the same curve
early_stop.py     the rule that stops losing points (sweep.early_stop)
criterion.py      what makes a point the best one
table.py          the table: console, Markdown, CSV
report.py         the report on the console, as files and as a plot, and the exit status
plots.py          sweep.png: the metric over steps and against each key, and parallel coordinates
"""
