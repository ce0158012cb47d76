"""Memory and time of a training run, before it is started.

formulas/        closed formulas of a step's memory and time on any mesh; no torch
played_run.py    play_run: a training step of one rank at the real world size, on one CPU process, nothing allocated
                 (dry run), for ranks whose memory differs, each in a child process, and a summary; no torch
dry_run.py       the program of such a child process
play.py          play: build, prepare and train with the functions of a run, and measure the second step
recipe_lines.py  the lines of a recipe that build what its steps train; no torch
fake_rank.py     process group without peers, tensors without memory, and the bytes that storages would take
mesh_picture.py  a mesh with its estimates as an SVG picture, drawn by mesh.svg.j2; no torch
"""
