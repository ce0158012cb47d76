"""Checks of `scripts/gpu.py`.

verdict.py    a line of the result, its verdict, and results.jsonl
step.py       a training step of a model with random weights, built as in a recipe
kernels.py    each kernel's output and gradients against float64
gradients.py  whole models' gradients and losses against transformers in float64, beside planted faults
speed.py      tokens/s, MFU, memory and host syncs of 1B and 8B, a bare loop, and parts
runs.py       whole runs: the recipe against a CPU, killed and resumed
several.py    checks of several GPUs
checks.py     the table of all checks; runs one of them in a process of its own
pack.sh       the folder to take to a machine without a package index
"""
