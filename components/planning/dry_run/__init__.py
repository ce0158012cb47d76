"""Dry run: a training step of one rank at the real world size, on one CPU process, with nothing allocated.

played_run.py    play_run: the ranks of a run whose memory differs, each in a child process, and a summary; no torch
__main__.py      the program of such a child process
play.py          play: build, prepare and train with the functions of a run, and measure the second step
recipe_lines.py  the lines of a recipe that build what its steps train; imports no torch
fake_rank.py     process group without peers, tensors without memory, and the bytes that storages would take
"""
