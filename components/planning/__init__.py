"""Memory and time of a training run, before it is started, and its curve on a mesh beside that of one process.

formulas/          closed formulas of a step's memory and time on any mesh; no torch
simulation.py      simulate_run: ranks of a run whose memory differs, each in a child process, and a summary; no torch
simulated_step.py  such a child: the functions of a run on fake tensors, at the real world size, on one CPU process
recipe_lines.py    the lines of a recipe that build what its steps train; no torch
fake_rank.py       process group without peers, tensors without memory, and the bytes that storages would take
mesh_picture.py    a mesh with its estimates as an SVG picture, drawn by mesh.svg.j2; no torch
parity.py          compare: starts the processes that compare each mesh's curve, gradients and replicas with one process
parity_reference.py   the loss curve of that process: plain PyTorch that shares no code with the training step
"""
