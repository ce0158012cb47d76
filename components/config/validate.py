"""Validation of a whole config: applies components/config/rules/ to the sections that it has. Imports no torch.

To add a rule that involves several sections, write a function in rules/ and call it below with `section(cfg, CLASS)`.
A rule about one section alone belongs in its dataclass.
"""

from __future__ import annotations

from components.config.errors import ConfigError
from components.config.micro_batches import batch_problems
from components.config.rules.compute_rules import (
    async_tp_problems,
    attention_problems,
    compile_problems,
    distillation_problems,
    float8_problems,
    loss_problems,
    offload_problems,
    precision_problems,
    qat_problems,
    recompute_problems,
    rope_problems,
    torch_problems,
)
from components.config.rules.data_rules import (
    data_problems,
    preference_problems,
    ramp_problems,
    score_problems,
)
from components.config.rules.mesh_rules import model_problems, quantized_problems, row_problems
from components.config.rules.run_rules import (
    adapter_problems,
    best_checkpoint_problems,
    decay_problems,
    optimizer_problems,
    profile_problems,
)
from components.config.schema.checkpoint import CheckpointConfig
from components.config.schema.model import TeacherConfig
from components.config.schema.objective import DistillationConfig, PreferenceConfig, ScoreConfig
from components.config.schema.optimizer import OptimizerConfig
from components.config.schema.parallelism import MeshShape
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.training import EvaluationConfig, TasksConfig, TrainingConfig
from components.config.shape import ModelShape


def validate(cfg: RecipeConfig, world_size: int | None, shape: ModelShape | None = None) -> list[str]:
    """Return all problems of `cfg` on `world_size` processes, each one sentence with value, rule and key.

    Args:
        cfg: Config of any recipe; a rule applies if the config has the sections that it involves.
        world_size: Number of processes; None if a key that determines it was rejected. Without it, or if the mesh
            cannot be resolved, rules that need the mesh are skipped.
        shape: Sizes of the model that can be read without loading it; unknown sizes (None) are checked on rank 0 later.
    """
    mesh, shape, problems = MeshShape(), shape or ModelShape(), []
    try:
        if world_size is not None:
            mesh = cfg.parallelism.resolve(world_size)
    except ConfigError as error:
        problems, world_size = error.problems, None
    model, parallelism, device = cfg.model, cfg.parallelism, cfg.cluster.device
    training, evaluation = section(cfg, TrainingConfig), section(cfg, EvaluationConfig)
    checkpoint, peft = section(cfg, CheckpointConfig), section(cfg, PeftConfig)
    preference, optimizer = section(cfg, PreferenceConfig), section(cfg, OptimizerConfig)
    scores, tasks = section(cfg, ScoreConfig), section(cfg, TasksConfig) or TasksConfig()

    problems += [
        *model_problems(parallelism, mesh, shape),
        *quantized_problems(peft, parallelism, mesh, shape),
    ]
    if training is not None:
        problems += batch_problems(training, parallelism, mesh)
        if checkpoint is not None:
            problems += best_checkpoint_problems(checkpoint, training)
        problems += profile_problems(cfg.logging.profile, training, world_size)
        problems += row_problems("training.seq_len", training.seq_len, parallelism, mesh)
        for number, (_, length) in enumerate(training.length_ramp):
            problems += row_problems(f"training.seq_len_ramp[{number}].seq_len", length, parallelism, mesh)
        problems += ramp_problems(training, cfg.data)
    if evaluation is not None:
        problems += row_problems("evaluation.seq_len", evaluation.seq_len, parallelism, mesh)
        if peft is not None:
            problems += adapter_problems(peft, evaluation)
    if optimizer is not None:
        problems += [*optimizer_problems(optimizer, model, peft), *decay_problems(optimizer, training)]
    takes_pairs = preference is not None or scores is not None
    problems += data_problems(cfg.data, takes_pairs=takes_pairs, takes_labels=scores is not None)
    if preference is not None:
        problems += preference_problems(preference, cfg.data, model, peft)
    if scores is not None:
        problems += score_problems(scores, cfg.data, model, cfg.generation)
    if section(cfg, DistillationConfig) is not None:
        problems += distillation_problems(model, section(cfg, TeacherConfig), training)
    problems += rope_problems(model, shape)
    problems += precision_problems(model, parallelism, section(cfg, TeacherConfig))
    problems += compile_problems(model, parallelism, mesh, shape)
    problems += async_tp_problems(model, parallelism, device, packs=cfg.data.pack)
    problems += loss_problems(model, parallelism, mesh, device, tasks)
    problems += recompute_problems(model, parallelism, mesh)
    problems += offload_problems(parallelism, mesh, device)
    problems += attention_problems(
        model, mesh, device, packs=cfg.data.pack, trains=training is not None, family=shape.family
    )
    problems += qat_problems(model, parallelism, mesh, adapts=peft is not None and peft.adapts)
    problems += torch_problems(peft, parallelism, mesh)
    problems += float8_problems(model, parallelism, mesh, device, adapts=peft is not None and peft.adapts)
    return problems


def legal_node_counts(cfg: RecipeConfig, shape: ModelShape | None = None) -> list[int]:
    """Return the numbers of nodes in `cluster.nodes` whose ranks the mesh and the global batch allow, in order.

    Args:
        cfg: A config that is valid on the largest number of nodes.
        shape: Sizes of the model, as in `validate`.
    """
    most = cfg.cluster.most_nodes
    return [count for count in range(cfg.cluster.fewest_nodes, most) if not _problems_on(cfg, count, shape)] + [most]


def node_count_problems(cfg: RecipeConfig, shape: ModelShape | None = None) -> list[str]:
    """Return the problems of `cfg` on the smallest number of nodes in `cluster.nodes`, if that is a range."""
    cluster = cfg.cluster
    if cluster.fewest_nodes == cluster.most_nodes or not cluster.procs_per_node.isdecimal():
        return []
    on_most = _problems_on(cfg, cluster.most_nodes, shape)
    return [
        f"cluster.nodes={cluster.nodes}: on {cluster.fewest_nodes} nodes: {problem}"
        for problem in _problems_on(cfg, cluster.fewest_nodes, shape)
        if problem not in on_most
    ]


def _problems_on(cfg: RecipeConfig, nodes: int, shape: ModelShape | None) -> list[str]:
    return validate(cfg, nodes * int(cfg.cluster.procs_per_node), shape)
