"""Schema of the config: plain dataclasses, one file per section.

`recipes.py` combines the sections into one class per recipe; a recipe selects its class by the annotation of
`main(cfg: FinetuneConfig)`. Each field is documented by the docstring below it. The YAML files in `conf/` only set
values of these fields.

recipes.py      config classes of the recipes
run.py          `run`, `checkpoint`, `logging`, `peft`: directory, seed, resume policy, saves, trackers, adapters
model.py        model, precision, kernels
data.py         sources, splits, columns; one class per kind
rollouts.py     `rollouts`, `reward`, prompts: what recipes/grpo.py samples and how it is rewarded
training.py     `training`, `evaluation`, `generation`: batch sizes, intervals, limits
objective.py    training loss, one class per kind; teacher
optimizer.py    update rule and learning-rate schedule, also as a function; one class per kind
parallelism.py  device mesh and sharding
cluster.py      nodes, processes, devices, timeouts; one class per kind
schedulers.py   parts of `cluster` for Slurm jobs and for Kubernetes jobs
"""

from components.config.schema.cluster import (
    ClusterConfig,
    ClusterKind,
    Device,
    KubernetesClusterConfig,
    LocalClusterConfig,
    SlurmClusterConfig,
)
from components.config.schema.data import DataConfig
from components.config.schema.model import (
    Attention,
    CausalLMConfig,
    DType,
    ModelConfig,
    RopeConfig,
    WeightInit,
)
from components.config.schema.objective import (
    ClassificationConfig,
    DistillationConfig,
    DPOConfig,
    KTOConfig,
    NextTokenConfig,
    ObjectiveConfig,
    ORPOConfig,
    PreferenceConfig,
    RewardConfig,
    ScoreConfig,
    SimPOConfig,
    TeacherConfig,
    TopKTeacherConfig,
)
from components.config.schema.optimizer import AdamWConfig, OptimizerConfig, Schedule
from components.config.schema.parallelism import (
    ActivationCheckpointing,
    MeshShape,
    ParallelismConfig,
    Strategy,
    UnevenHeads,
)
from components.config.schema.recipes import (
    AnswerPromptsConfig,
    ClassifyConfig,
    DistillConfig,
    DpoConfig,
    EvaluateConfig,
    FinetuneConfig,
    GrpoConfig,
    PretrainConfig,
    RecipeConfig,
    StoreTeacherConfig,
    TrainConfig,
)
from components.config.schema.run import (
    CheckpointConfig,
    LoggingConfig,
    MlflowConfig,
    PeftConfig,
    PeftExport,
    PeftMethod,
    RunConfig,
    TrackioConfig,
    WandbConfig,
    WandbMode,
)
from components.config.schema.schedulers import (
    ContainerConfig,
    ContainerRuntime,
    GpuRequest,
    KubernetesConfig,
    Launcher,
    PodUser,
    RequeueConfig,
    Workload,
)
from components.config.schema.training import (
    EvaluationConfig,
    GenerationConfig,
    TasksConfig,
    TrainingConfig,
    TrainingTasksConfig,
)

__all__ = [
    "ActivationCheckpointing",
    "AdamWConfig",
    "AnswerPromptsConfig",
    "Attention",
    "CausalLMConfig",
    "CheckpointConfig",
    "ClassificationConfig",
    "ClassifyConfig",
    "ClusterConfig",
    "ClusterKind",
    "ContainerConfig",
    "ContainerRuntime",
    "DPOConfig",
    "DType",
    "DataConfig",
    "Device",
    "DistillConfig",
    "DistillationConfig",
    "DpoConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "FinetuneConfig",
    "GenerationConfig",
    "GpuRequest",
    "GrpoConfig",
    "KTOConfig",
    "KubernetesClusterConfig",
    "KubernetesConfig",
    "Launcher",
    "LocalClusterConfig",
    "LoggingConfig",
    "MeshShape",
    "MlflowConfig",
    "ModelConfig",
    "NextTokenConfig",
    "ORPOConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "PeftConfig",
    "PeftExport",
    "PeftMethod",
    "PodUser",
    "PreferenceConfig",
    "PretrainConfig",
    "RecipeConfig",
    "RequeueConfig",
    "RewardConfig",
    "RopeConfig",
    "RunConfig",
    "Schedule",
    "ScoreConfig",
    "SimPOConfig",
    "SlurmClusterConfig",
    "StoreTeacherConfig",
    "Strategy",
    "TasksConfig",
    "TeacherConfig",
    "TopKTeacherConfig",
    "TrackioConfig",
    "TrainConfig",
    "TrainingConfig",
    "TrainingTasksConfig",
    "UnevenHeads",
    "WandbConfig",
    "WandbMode",
    "WeightInit",
    "Workload",
]
