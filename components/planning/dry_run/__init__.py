"""Dry run: a training step of one rank at the real world size, on one CPU process, with nothing allocated.

dry_run_result.py     DryRun: bytes, process groups and traffic of a rank; imports no torch
played_run.py         play_run: the ranks of a run whose memory differs, and a summary as text; imports no torch
dry_run_children.py   start_dry_runs: one child process per rank; ranks_to_play; imports no torch
play.py               play: build, prepare and train with the functions of a run, and measure the second step
recipe_lines.py       the lines of a recipe that build what its steps train; imports no torch
played_config.py      what a dry run changes in a config, and what it refuses; imports no torch
synthetic_batches.py  micro-batches as the recipes' own data sets make them
fake_rank.py          process group without peers, tensors without memory, and the private parts of torch they need
storage_tracker.py    bytes of all storages of this rank, and the operator at the peak
storages.py           bytes of given tensors, and of those saved for the backward
"""
