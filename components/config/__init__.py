"""The typed configuration of a run. Imports no torch, so that submitting and rejecting a run is quick.

schema/           one dataclass per section; the single source of keys, types and defaults
kinds.py          the kinds of each section: section -> kind -> dataclass
compose/          Hydra's composition, merged strictly into the schema, then real dataclasses
validate.py       every problem of a whole config: the rules of rules/ on the sections that it has
rules/            rules that several sections share, or that depend on the mesh; a file per subject
micro_batches.py  the split of a global batch over the mesh
layouts.py        the split of heads, layers and micro-batches over mesh axes
shape.py          what decides divisibility in a model (heads, layers, ...), read from files without transformers
model_files.py    the files that model.path names
secrets.py        values that look like secrets, which no run directory may hold
errors.py         ConfigError: an error of the user's
safe_yaml.py      YAML of other programs, parsed only within bounds of size and depth
metrics_log.py    metrics.jsonl: its checksums, and what is damaged in it
interrupt.py      the message a run prints when it receives Ctrl-C
"""
