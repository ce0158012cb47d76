"""Composition by Hydra and strict conversion to the schema: the only place that turns YAML into dataclasses.

Hydra runs once, in the process that the user started. The composed config is checked against the dataclasses (Hydra
itself accepts `+typo=1`), converted to plain objects, and frozen to RUN_DIR/config.yaml, which every rank reads.

command_line.py  compose_from_command_line: a typed and validated config from the command line
sources.py       config folders, schemas in Hydra's store, options of each group
short_forms.py   data=mine.jsonl and model=OWNER/NAME
diagnose.py      all problems of a command line, not only the first one that Hydra finds
explain.py       errors of Hydra, omegaconf and PyYAML in Meshbook's terms
synonyms.py      names that other tools use for the keys
help_text.py     the keys with type, default and docstring; --help
sweep.py         points of a command line with -m
sweep_keys.py    keys of the sweep itself (sweep.metric), and values: log(1e-5,1e-3,5), random draws
typed.py         nested dicts to dataclasses, strictly; strings that omegaconf or YAML would misread
frozen.py        config to YAML and back; resolution of ${...}
"""

from components.config.compose.frozen import read_frozen, to_yaml

__all__ = ["read_frozen", "to_yaml"]
