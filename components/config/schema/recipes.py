"""One config class per recipe, combined from the sections; a recipe selects it by `main(cfg: FinetuneConfig)`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from components.config.schema.cluster import ClusterConfig, LocalClusterConfig
from components.config.schema.data import DataConfig, LabelsDataConfig, PreferencesDataConfig, ScoredDataConfig
from components.config.schema.model import CausalLMConfig, LossMethod, ModelConfig
from components.config.schema.objective import (
    ClassificationConfig,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    NextTokenConfig,
    PolicyConfig,
    PreferenceConfig,
    Reference,
    RewardConfig,
    ScoreConfig,
    TeacherConfig,
    TopKTeacherConfig,
)
from components.config.schema.optimizer import AdamWConfig, OptimizerConfig
from components.config.schema.parallelism import ParallelismConfig
from components.config.schema.rollouts import PromptsDataConfig, RewardFunctionsConfig, RolloutsConfig
from components.config.schema.run import CheckpointConfig, LoggingConfig, PeftConfig, RunConfig
from components.config.schema.training import (
    AnswersConfig,
    EvaluationConfig,
    GenerationConfig,
    TrainingConfig,
    TrainingTasksConfig,
)
from components.protocol.errors import ConfigError, field_values
from components.protocol.run_files import CHECKPOINT_MANIFEST, CHECKPOINTS, checkpoint_folders
from components.storage.object_store import is_url

Section = TypeVar("Section")
Config = TypeVar("Config", bound="RecipeConfig")


@dataclass(kw_only=True, slots=True)
class RecipeConfig:
    """Sections that every recipe has."""

    run: RunConfig = field(default_factory=RunConfig)
    """Run directory, name, seed and resume policy."""
    cluster: ClusterConfig = field(default_factory=LocalClusterConfig)
    """Nodes, processes and devices, and the Slurm job."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Device mesh and how the model is sharded over it."""
    model: ModelConfig
    """Model, precision and kernels."""
    data: DataConfig
    """Dataset, its splits and its columns."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Texts generated before and after training."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Console output, loss plot, profiler traces and trackers."""


@dataclass(kw_only=True, slots=True)
class TrainConfig(RecipeConfig):
    """Sections that every training recipe has; each adds its objective."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batch sizes, number of steps, logging and evaluation intervals."""
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    """Optimizer and learning-rate schedule."""
    peft: PeftConfig = field(default_factory=PeftConfig)
    """Adapters (LoRA), instead of training every parameter."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Save intervals, retention policy and export."""


@dataclass(kw_only=True, slots=True)
class FinetuneConfig(TrainConfig):
    """Config of `recipes/finetune.py`."""

    objective: NextTokenConfig = field(default_factory=NextTokenConfig)
    """Training loss."""
    evaluation: TrainingTasksConfig = field(default_factory=TrainingTasksConfig)
    """Benchmark tasks that measure the model during training."""


@dataclass(kw_only=True, slots=True)
class DpoConfig(TrainConfig):
    """Config of `recipes/dpo.py`."""

    data: PreferencesDataConfig
    """Preference pairs, or labeled answers for objective=kto."""
    objective: PreferenceConfig = field(default_factory=DPOConfig)
    """Training loss."""
    evaluation: TrainingTasksConfig = field(default_factory=TrainingTasksConfig)
    """Benchmark tasks that measure the model during training."""


@dataclass(kw_only=True, slots=True)
class ClassifyConfig(TrainConfig):
    """Config of `recipes/classify.py`."""

    data: ScoredDataConfig
    """Labeled texts, or preference pairs for objective=reward."""
    objective: ScoreConfig = field(default_factory=ClassificationConfig)
    """Training loss."""


@dataclass(kw_only=True, slots=True)
class DistillConfig(TrainConfig):
    """Config of `recipes/distill.py`."""

    teacher: TeacherConfig
    """The model whose distribution the trained model learns."""
    objective: DistillationConfig = field(default_factory=DistillationConfig)
    """Training loss."""
    evaluation: TrainingTasksConfig = field(default_factory=TrainingTasksConfig)
    """Benchmark tasks that measure the student during training."""


@dataclass(kw_only=True, slots=True)
class GrpoConfig(TrainConfig):
    """Config of `recipes/grpo.py`."""

    data: PromptsDataConfig
    """Prompts, and what reward functions need to know of them."""
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    """Answers sampled from the model."""
    reward: RewardFunctionsConfig = field(default_factory=RewardFunctionsConfig)
    """Functions that reward the answers."""
    objective: PolicyConfig = field(default_factory=GRPOConfig)
    """Training loss."""
    evaluation: TrainingTasksConfig = field(default_factory=TrainingTasksConfig)
    """Benchmark tasks that measure the model during training."""


@dataclass(kw_only=True, slots=True)
class StoreTeacherConfig(DistillConfig):
    """Config of `scripts/teacher.py`: that of the distillation, with a teacher to run."""

    teacher: TopKTeacherConfig
    """The model whose most likely tokens are stored."""


@dataclass(kw_only=True, slots=True)
class PretrainConfig(FinetuneConfig):
    """Config of `recipes/pretrain.py`: the same sections as fine-tuning."""

    def __post_init__(self) -> None:
        if self.model.chat_template is not None:
            raise ConfigError(
                f"model.chat_template={self.model.template_name}: a pretraining run has no chat template; remove it, "
                "or use recipes/finetune.py"
            )


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(RecipeConfig):
    """Config of `recipes/evaluate.py`."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Checkpoint to evaluate, and the sizes of the forward passes."""
    peft: PeftConfig = field(default_factory=PeftConfig)
    """Adapters of the evaluated checkpoint; must match the run that trained them."""


@dataclass(kw_only=True, slots=True)
class AnswerPromptsConfig(EvaluateConfig):
    """Config of `scripts/answer.py`: an evaluation's, with prompts. Of `data`, only the system message is used."""

    answers: AnswersConfig
    """Prompts to answer."""


def section(cfg: RecipeConfig, schema: type[Section]) -> Section | None:
    """Return the first section of `cfg` that is an instance of `schema`, or None."""
    return next((value for value in field_values(cfg).values() if isinstance(value, schema)), None)


def score_labels(data: object, objective: object) -> tuple[str, ...] | None:
    """Return the names of the outputs of a model's score head; None for a model with an LM head.

    Args:
        data, objective: Sections of a run's config; None for a recipe without the section.
    """
    if not isinstance(objective, ScoreConfig):
        return None
    if isinstance(objective, RewardConfig) or not isinstance(data, LabelsDataConfig):
        return ("LABEL_0",)  # transformers' name for a single output
    return data.labels


def teacher_model(cfg: DistillConfig) -> CausalLMConfig:
    """Return the config of the teacher, which is computed like the student."""
    teacher, student = cfg.teacher, cfg.model
    return CausalLMConfig(
        path=teacher.path,
        revision=teacher.revision,
        tokenizer=teacher.tokenizer,
        dtype=teacher.dtype or student.dtype,
        compute_dtype=student.compute_dtype,
        attention=student.attention,
        compile=student.compile,
        loss=LossMethod.chunked,
        trust_remote_code=teacher.trust_remote_code,
    )


def frozen_model(cfg: RecipeConfig) -> ModelConfig | None:
    """Return the config of the model that a run loads and does not train, a teacher or a copy as reference; or None."""
    objective = section(cfg, PreferenceConfig)
    if isinstance(objective, DPOConfig | KTOConfig) and objective.reference is Reference.frozen_copy:
        return cfg.model
    if isinstance(cfg, GrpoConfig) and policy_reference(cfg) is Reference.frozen_copy:
        return cfg.model
    if isinstance(cfg, DistillConfig) and cfg.teacher.path is not None:
        return teacher_model(cfg)
    return None


def policy_reference(cfg: GrpoConfig) -> Reference | None:
    """Return how the reference model of a reinforcement-learning run scores answers; None: the run needs none."""
    if cfg.objective.beta == 0:
        return None
    return cfg.objective.reference or (Reference.adapters_off if cfg.peft.adapts else Reference.frozen_copy)


def sizes_in_rows(cfg: RecipeConfig) -> TrainingConfig | None:
    """Return the training section with batch sizes in rows, two of which are a pair of answers."""
    training = section(cfg, TrainingConfig)
    if training is None or (section(cfg, PreferenceConfig) or section(cfg, RewardConfig)) is None:
        return training
    return replace(
        training, global_batch_size=2 * training.global_batch_size, micro_batch_size=2 * training.micro_batch_size
    )


def frozen_config(cfg: TrainConfig, model: ModelConfig) -> EvaluateConfig:
    """Return the config of a model that is not trained, with the mesh and the batch sizes of a training run."""
    rows = sizes_in_rows(cfg) or cfg.training
    return EvaluateConfig(
        run=cfg.run,
        cluster=cfg.cluster,
        parallelism=cfg.parallelism,
        model=model,
        data=cfg.data,
        logging=cfg.logging,
        evaluation=EvaluationConfig(
            seq_len=rows.seq_len,
            micro_batch_size=rows.micro_batch_size,
            step_timeout_seconds=rows.step_timeout_seconds,
        ),
    )


def named_models(cfg: RecipeConfig) -> dict[str, str]:
    """Return the paths of the models, tokenizers and adapters that a run loads, by key; not URLs."""
    model = cfg.model
    paths = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.chat_template": model.template_model,
    }
    peft = section(cfg, PeftConfig)
    if peft is not None and peft.path is not None and not is_url(peft.path) and not _has_adapters_stored(cfg):
        paths["peft.path"] = peft.path
    if (teacher := section(cfg, TeacherConfig)) is not None:
        paths |= {"teacher.path": teacher.path, "teacher.tokenizer": teacher.tokenizer}
    return {key: path for key, path in paths.items() if path is not None and path != "bytes"}


def _has_adapters_stored(cfg: RecipeConfig) -> bool:
    """Return whether a checkpoint, from which the run begins, replaces the adapters at peft.path."""
    evaluation = section(cfg, EvaluationConfig)
    if evaluation is not None and evaluation.checkpoint is not None:
        return True
    if section(cfg, CheckpointConfig) is None or cfg.run.resume == "never":
        return False
    if section(cfg, DPOConfig) is not None or section(cfg, KTOConfig) is not None:
        return False  # the reference model has the adapters that training began with
    if cfg.run.resume != "auto" or cfg.run.dir is None:
        return cfg.run.resume != "auto"
    with suppress(OSError):  # what cannot be listed is reported when the run looks for its checkpoint
        folders = checkpoint_folders(Path(os.path.expanduser(cfg.run.dir), CHECKPOINTS))
        return any((folder / CHECKPOINT_MANIFEST).is_file() for folder in folders)
    return False


def with_section(cfg: Config, old: object, new: object) -> Config:
    """Return a copy of `cfg` in which the section `old` is replaced by `new`."""
    changed: dict[str, Any] = {name: new for name, value in field_values(cfg).items() if value is old}
    return replace(cfg, **changed)
