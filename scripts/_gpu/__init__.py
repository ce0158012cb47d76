"""Checks of `scripts/gpu.py`.

verdict.py   a line of the result, and its verdict
step.py      a training step of a model with random weights, built as in a recipe
correct.py   the same numbers as on a CPU, packed rows, host syncs, the planner's memory
speed.py     compiled layers, throughput, loss, attention, float8, NF4, time during which the GPU is busy
runs.py      whole runs: killed and resumed, samples, a hang
checks.py    the table of all checks; runs one of them in a process of its own
"""
