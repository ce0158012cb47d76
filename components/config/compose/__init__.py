"""Hydra's composition, merged strictly into the schema: the only place that turns YAML into dataclasses.

Hydra runs once, in the process that a person started. What it composes is checked against the dataclasses (Hydra
itself lets `+typo=1` pass), becomes plain objects, and is frozen to RUN_DIR/config.yaml, which every rank reads.

command_line.py  compose_from_command_line: what a person typed, typed and checked
sources.py       conf/, the schemas in Hydra's store, the options of each group
diagnose.py      all that is wrong with a command line, not only what Hydra stumbled over first
explain.py       Hydra's and omegaconf's errors in our words
sweep.py         the points of a command line with -m
typed.py         nested dicts to dataclasses, strictly
texts.py         texts that look like a reference or a missing value
frozen.py        the config as YAML, and back
"""

from components.config.compose.frozen import read_frozen, to_yaml

__all__ = ["read_frozen", "to_yaml"]
