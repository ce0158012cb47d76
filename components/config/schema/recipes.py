"""The sections put together: one class per recipe. `main(cfg: FinetuneConfig)` is how a recipe names its schema."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from components.config.schema.checkpoint import CheckpointConfig
from components.config.schema.checks import field_values
from components.config.schema.cluster import ClusterConfig, LocalClusterConfig
from components.config.schema.data import DataConfig, PreferencesDataConfig
from components.config.schema.logging import LoggingConfig
from components.config.schema.model import ModelConfig
from components.config.schema.objective import NextTokenConfig, PreferenceConfig
from components.config.schema.optimizer import AdamWConfig, OptimizerConfig
from components.config.schema.parallelism import ParallelismConfig
from components.config.schema.peft import PeftConfig
from components.config.schema.run import RunConfig
from components.config.schema.training import EvaluationConfig, GenerationConfig, TrainingConfig

Section = TypeVar("Section")
Config = TypeVar("Config", bound="RecipeConfig")


@dataclass(kw_only=True, slots=True)
class RecipeConfig:
    """What every recipe has."""

    run: RunConfig = field(default_factory=RunConfig)
    """Identity of the run."""
    cluster: ClusterConfig = field(default_factory=LocalClusterConfig)
    """Nodes, processes and devices."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """The mesh and how the model is laid over it."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data set."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sample texts."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Console, plot and wandb."""


@dataclass(kw_only=True, slots=True)
class TrainConfig(RecipeConfig):
    """What every recipe that trains has; each names its objective."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Sizes and policy of the loop."""
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    """The update rule and its schedule."""
    peft: PeftConfig = field(default_factory=PeftConfig)
    """Adapters in place of full fine-tuning."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saves and export."""


@dataclass(kw_only=True, slots=True)
class FinetuneConfig(TrainConfig):
    """`recipes/finetune.py`."""

    objective: NextTokenConfig = field(default_factory=NextTokenConfig)
    """What is optimized."""


@dataclass(kw_only=True, slots=True)
class DpoConfig(TrainConfig):
    """`recipes/dpo.py`."""

    data: PreferencesDataConfig
    """The pairs."""
    objective: PreferenceConfig = field(default_factory=PreferenceConfig)
    """What is optimized."""


@dataclass(kw_only=True, slots=True)
class PretrainConfig(FinetuneConfig):
    """`recipes/pretrain.py`: the sections of fine-tuning."""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(RecipeConfig):
    """`recipes/evaluate.py`."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured."""
    peft: PeftConfig = field(default_factory=PeftConfig)
    """Adapters of the checkpoint that is evaluated."""


def section(cfg: RecipeConfig, schema: type[Section]) -> Section | None:
    """Return the section of `cfg` that is a `schema` or a subclass of it, the first of several; None: it has none."""
    return next((value for value in field_values(cfg).values() if isinstance(value, schema)), None)


def with_section(cfg: Config, old: object, new: object) -> Config:
    """Return a copy of `cfg` with `new` in place of its section `old`."""
    changed: dict[str, Any] = {name: new for name, value in field_values(cfg).items() if value is old}
    return replace(cfg, **changed)
