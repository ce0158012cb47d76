"""The typed configuration of a run. Imports no torch: submitting and refusing a run must be quick.

schema/      one dataclass per section; the single source of keys, types and defaults
compose.py   Hydra's composition, merged strictly into the schema, then real dataclasses
validate.py  the rules that need several sections and the number of processes
shape.py     what decides divisibility in a model (heads, layers, ...), read from files without transformers
errors.py    ConfigError: the configuration is rejected
metrics_log.py  metrics.jsonl: its checksums, and what is damaged in it
"""
