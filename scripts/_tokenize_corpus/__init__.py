"""Parts of scripts/tokenize_corpus.py.

options.py     the command line: input files and their shards, what one task of a Slurm array does
workers.py     process_files: one process per input file
display.py     Display: progress bar on a terminal, a line per file elsewhere
"""
