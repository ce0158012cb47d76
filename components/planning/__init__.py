"""Memory and time of a training run, before it is started.

formulas/   closed formulas of a step's memory and time on any mesh; no torch
draw/       a mesh with its estimates as an SVG picture; no torch
dry_run/    one rank of any world size on fake tensors, through the code of a run
"""
