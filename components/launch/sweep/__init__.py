"""`-m`: many runs from one command line, and one table of them. Imports no torch.

command.py     run a command line with -m
plan.py        the sweep's folder: sweep.json, a note per point, the lock
points.py      one point after the other, each a launcher of its own in a child process; retrying
point_rows.py  the state of each point, from its files and its job
losses.py      points that train one curve must agree on it
table.py       the table: console, Markdown, CSV
chart.py       the table as PNG
report.py      all of these at once, and the exit status
"""
