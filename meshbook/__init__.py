"""The library, and the `meshbook` command: one entry to the recipes and the tools, from any folder.

import meshbook

meshbook.run("finetune", model="tiny")  # in a notebook: progress, table and loss curve

A recipe of your own imports `recipe`, `data`, `models`, `training` and its config class from here. Names are imported
at first use; only `data`, `models`, `training` and `checkpoint` import torch, when one of their names is used.

recipe             decorator of a recipe's main
data, models, training, checkpoint  what the loop of a recipe calls
schema             config classes of all sections; those of the recipes are here too: FinetuneConfig, ...
ConfigError        rejected config, which ends a run with one sentence
run                start a recipe from Python; RunResult: its run, RunFailed: its failure

__main__.py      main: which recipe, tool or question a command line names
programs.py      the recipes and tools: where they are, what they do, and how one is started
key_help.py      meshbook help KEY: keys and options as text
completion.py    the words that a shell may complete
notebook.py      run: a recipe in a child process, and its table and picture

A wheel also installs recipes/, scripts/, conf/ and slurm/ in this package; in a checkout they are next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components import checkpoint, data, models, training
    from components.config import schema
    from components.config.schema import (
        ClassifyConfig,
        DistillConfig,
        DpoConfig,
        EvaluateConfig,
        FinetuneConfig,
        GrpoConfig,
        PretrainConfig,
        TrainConfig,
    )
    from components.launch import recipe
    from components.protocol.errors import ConfigError
    from meshbook.notebook import RunFailed, RunResult, run
else:
    __getattr__, __dir__ = package.lazy_names(__name__)
