"""Memory and time of a training run, before it is started.

formulas/        closed formulas of a step's memory and time on any mesh; no torch
dry_run/         one rank of any world size on fake tensors, through the code of a run
mesh_picture.py  a mesh with its estimates as an SVG picture; no torch
rank_panel.py    its nodes with their ranks, and the table of the axes
svg.py           shapes and texts of an SVG file
"""
