"""Composition: the only place that turns YAML and command lines into dataclasses.

Hydra reads the defaults lists and decides which files are merged, in the process that the user started. Plain dicts
are merged, completed by the defaults of the dataclasses, and typed once. The config is frozen to RUN_DIR/config.yaml,
which every rank reads.

command_line.py  compose_from_command_line: options, --help and --cfg, and the config of a command line
composition.py   files, values of the command line, defaults and typing, with all problems at once
sources.py       config folders, the files that Hydra's defaults lists select, options of each group
short_forms.py   data=mine.jsonl and model=OWNER/NAME; texts in quotes
overrides.py     what is wrong with a single override
typed.py         nested dicts to dataclasses, strictly; texts of YAML as they are written
explain.py       config errors in one sentence
synonyms.py      names that other tools use for the keys
help_text.py     the keys with type, default and docstring; --help
sweep.py         points of a command line with -m
sweep_keys.py    keys of the sweep itself (sweep.metric), and values: log(1e-5,1e-3,5), random draws
frozen.py        config to YAML and back; resolution of ${...}
"""

from components.config.compose.frozen import read_frozen, to_yaml

__all__ = ["read_frozen", "to_yaml"]
