"""Typed configuration of a run. Imports no torch, so that a run is submitted or rejected quickly.

schema/           one dataclass per section: the single source of keys, types and defaults
kinds.py          registry of the kinds of each section: section -> kind -> dataclass
compose/          composition by Hydra, strict conversion to the dataclasses, error messages
validate.py       all problems of a whole config: applies rules/ to its sections
rules/            rules that involve several sections or the mesh, a file per subject
micro_batches.py  split of the global batch into micro-batches
layouts.py        distribution of attention heads and layers over mesh axes
shape.py          sizes of a model (heads, layers, ...), read from its files without transformers
model_files.py    files that model.path refers to
secrets.py        detection of secrets, which must not be written to a run directory
errors.py         ConfigError
safe_yaml.py      YAML parser with limits on expanded size and depth
metrics_log.py    metrics.jsonl: checksums and detection of damage
"""
