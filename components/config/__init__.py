"""Typed configuration of a run. Imports no torch, so that a run is submitted or rejected quickly.

schema/           one dataclass per section: the single source of keys, types and defaults
kinds.py          registry of the kinds of each section: section -> kind -> dataclass
compose/          composition by Hydra, strict conversion to the dataclasses, error messages
rules.py          validate: all problems of a whole config; rules about data, preferences, optimizer and run
mesh_rules.py     meshes of N processes and their names; rules about what a mesh must divide; micro-batches
compute_rules.py  rules about kernels and precision
objective_rules.py  rules about objectives, and the data and models that they need
model_files.py    files of model.path: where they are, and the format of quantized weights
shape.py          sizes of a model (heads, layers, ...), read from the files of model.path without transformers
stored_run.py     a run as its files describe it; metrics.jsonl with checksums
teacher_files.py  headers of the files with a teacher's most likely tokens
"""
