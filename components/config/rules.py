"""Validation of a whole config: all rules, applied to the sections that it has. Imports no torch.

To add a rule that involves several sections, write a function here, in mesh_rules.py or in compute_rules.py, and call
it in `validate` with `section(cfg, CLASS)`. A rule about one section alone belongs in its dataclass.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from enum import StrEnum
from typing import get_type_hints

from components.config.compute_rules import (
    async_tp_problems,
    attention_problems,
    compile_problems,
    float8_problems,
    loss_problems,
    offload_problems,
    precision_problems,
    qat_problems,
    recompute_problems,
    rope_problems,
    router_problems,
    torch_problems,
)
from components.config.kinds import KINDS, kinds_of
from components.config.mesh_rules import batch_problems, model_problems, quantized_problems, row_problems
from components.config.objective_rules import (
    distillation_problems,
    policy_problems,
    preference_problems,
    score_problems,
)
from components.config.schema.data import (
    ChatDataConfig,
    DataConfig,
    DataKind,
    LabelsDataConfig,
    MixtureDataConfig,
    Overlong,
    PreferencesDataConfig,
    RowsDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from components.config.schema.model import DType, ModelConfig
from components.config.schema.objective import (
    DistillationConfig,
    PolicyConfig,
    PreferenceConfig,
    RewardConfig,
    ScoreConfig,
    TeacherConfig,
)
from components.config.schema.optimizer import AdamW8bitConfig, MuonConfig, OptimizerConfig, Schedule
from components.config.schema.parallelism import MeshShape, ParallelismConfig
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.rollouts import PromptsDataConfig
from components.config.schema.run import CheckpointConfig, LoggingConfig, PeftConfig, ProfileConfig, WandbMode
from components.config.schema.training import (
    AnswersConfig,
    EvaluationConfig,
    GenerationConfig,
    StageConfig,
    TasksConfig,
    TrainingConfig,
)
from components.config.shape import ModelShape
from components.protocol.errors import ConfigError


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
            problems += _best_checkpoint_problems(checkpoint, training)
        problems += _profile_problems(cfg.logging.profile, training, world_size)
        problems += row_problems("training.seq_len", training.seq_len, parallelism, mesh)
        for number, (_, length) in enumerate(training.length_ramp):
            problems += row_problems(f"training.seq_len_ramp[{number}].seq_len", length, parallelism, mesh)
        problems += _cut_problems(training, cfg.data)
        problems += _frozen_problems(training, model, peft)
        problems += _stage_problems(cfg.data, training, optimizer, parallelism, mesh)
    if evaluation is not None:
        problems += row_problems("evaluation.seq_len", evaluation.seq_len, parallelism, mesh)
        if peft is not None:
            problems += _adapter_problems(peft, evaluation)
    if optimizer is not None:
        problems += [*_optimizer_problems(optimizer, model, peft), *optimizer.decay_problems(training)]
    problems += _generation_problems(cfg.generation, cfg.data, section(cfg, AnswersConfig))
    takes_pairs = preference is not None or scores is not None
    takes_prompts = section(cfg, PolicyConfig) is not None
    problems += _data_problems(
        cfg.data, takes_pairs=takes_pairs, takes_labels=scores is not None, takes_prompts=takes_prompts
    )
    if preference is not None:
        problems += preference_problems(preference, cfg.data, model, peft)
    if scores is not None:
        problems += score_problems(scores, cfg.data, model, cfg.generation)
    if section(cfg, DistillationConfig) is not None:
        cut_at = [] if training is None else list(_sources_of_cut_rows(training, cfg.data))
        problems += distillation_problems(model, section(cfg, TeacherConfig), cut_at)
    problems += policy_problems(cfg, mesh)
    problems += rope_problems(model, shape)
    problems += router_problems(model, shape, adapts=peft is not None and peft.adapts)
    problems += precision_problems(model, parallelism, section(cfg, TeacherConfig))
    problems += compile_problems(model, parallelism, mesh, shape)
    problems += async_tp_problems(model, parallelism, device, packs=cfg.data.pack)
    problems += loss_problems(model, parallelism, mesh, device, tasks)
    problems += recompute_problems(model, parallelism, mesh)
    problems += offload_problems(parallelism, mesh, device)
    problems += attention_problems(model, mesh, device, packs=cfg.data.pack, trains=training is not None, shape=shape)
    problems += qat_problems(model, parallelism, mesh, adapts=peft is not None and peft.adapts)
    problems += torch_problems(peft, parallelism, mesh)
    problems += float8_problems(model, parallelism, mesh, device, adapts=peft is not None and peft.adapts)
    return problems


def legal_node_counts(
    cfg: RecipeConfig, on_most: list[str], shape: ModelShape | None = None
) -> tuple[list[int], list[str]]:
    """Return the numbers of nodes in `cluster.nodes` whose ranks the mesh and the global batch allow, in order.

    Also returns the problems on the smallest number, which a range must allow.

    Args:
        cfg: The config.
        on_most: What `validate` returns for the largest number.
        shape: Sizes of the model, as in `validate`.
    """
    cluster, most = cfg.cluster, cfg.cluster.most_nodes
    if cluster.fewest_nodes == most or not cluster.procs_per_node.isdecimal():
        return [most], []
    counts = range(cluster.fewest_nodes, most)
    problems_of = {count: validate(cfg, count * int(cluster.procs_per_node), shape) for count in counts}
    problems = [
        f"cluster.nodes={cluster.nodes}: on {cluster.fewest_nodes} nodes: {problem}"
        for problem in problems_of[cluster.fewest_nodes]
        if problem not in on_most
    ]
    return [count for count in counts if not problems_of[count]] + [most], problems


def accepted_kinds(recipe: type[RecipeConfig], section: str) -> Collection[StrEnum]:
    """Return the kinds of a section that a recipe accepts: those of its field, pairs only with an objective of pairs.

    Labels are accepted only with an objective of labels. A field annotated with a user's subclass of a kind accepts
    that kind; one with another class that is not in the registry of kinds accepts every kind.
    """
    hints = get_type_hints(recipe)
    hint = hints.get(section)
    own = {kind for kind, each in KINDS[section].items() if isinstance(hint, type) and issubclass(hint, each)}
    kinds = set(kinds_of(hint) or own or KINDS[section])
    objective = hints.get("objective", object)
    classes = [each for each in (objective, *kinds_of(objective).values()) if isinstance(each, type)]
    if not any(issubclass(each, PreferenceConfig | RewardConfig) for each in classes):
        kinds.discard(DataKind.preferences)
    if not any(issubclass(each, ScoreConfig) for each in classes):
        kinds.discard(DataKind.labels)
    if not any(issubclass(each, PolicyConfig) for each in classes):
        kinds.discard(DataKind.prompts)
    return kinds


def _data_problems(
    data: DataConfig, *, takes_pairs: bool, takes_labels: bool = False, takes_prompts: bool = False
) -> list[str]:
    """Require a held-out split, weights only on sources of a mixture, turns where they are cut, and pairs, labels or
    prompts only if the recipe takes them."""
    problems = []
    parts = {"data": data}
    if isinstance(data, MixtureDataConfig):
        parts |= {f"data.sources.{name}": source for name, source in data.sources.items()}
    problems += [
        f"{key}.kind={part.kind}: holds preference pairs, which this recipe does not train on; use recipes/dpo.py, "
        f"or choose another option of {key}"
        for key, part in parts.items()
        if isinstance(part, PreferencesDataConfig) and not takes_pairs
    ]
    problems += [
        f"{key}.kind={part.kind}: holds labeled texts, which this recipe does not train on; use recipes/classify.py, "
        f"or choose another option of {key}"
        for key, part in parts.items()
        if isinstance(part, LabelsDataConfig) and not takes_labels
    ]
    problems += [
        f"{key}.kind={part.kind}: holds prompts without answers, which this recipe does not train on; use "
        f"recipes/grpo.py, or choose another option of {key}"
        for key, part in parts.items()
        if isinstance(part, PromptsDataConfig) and not takes_prompts
    ]
    problems += [
        f"{key}.overlong=keep_last: samples of {key}.kind={part.kind} have no older turns to leave out; set it to "
        "truncate, drop or refuse, or use conversations (data=chat_jsonl)"
        for key, part in parts.items()
        if part.overlong is Overlong.keep_last
        and not isinstance(part, ChatDataConfig | TextDataConfig | TokensDataConfig | MixtureDataConfig)
    ]
    if data.weight is not None:
        problems.append(f"data.weight={data.weight}: only sources of a mixture have weights; remove it")
    sources = data.sources if isinstance(data, MixtureDataConfig) else {"": data}
    if any(
        each.eval_fraction
        or each.eval_split is not None
        or (isinstance(each, RowsDataConfig | TokensDataConfig) and each.eval_path)
        for each in sources.values()
    ):
        return problems
    rule = "nothing is held out, but every run evaluates at the end"
    if isinstance(data, MixtureDataConfig):
        problems.append(
            f"data.sources: {', '.join(sources)} have eval_fraction=0: {rule}; set data.sources.NAME.eval_fraction of "
            "one above 0, or its eval_split"
        )
    else:
        other = "data.eval_split or data.eval_path" if isinstance(data, RowsDataConfig) else "data.eval_split"
        other = "data.eval_path" if isinstance(data, TokensDataConfig) else other
        problems.append(f"data.eval_fraction={data.eval_fraction}: {rule}; set it above 0, or set {other}")
    return problems


def _generation_problems(generation: GenerationConfig, data: DataConfig, answers: AnswersConfig | None) -> list[str]:
    """Require sampling for several answers of a prompt, and conversations if tool calls are compared with theirs."""
    sources, problems = data.sources.values() if isinstance(data, MixtureDataConfig) else [data], []
    if answers is not None and answers.per_prompt > 1 and generation.temperature == 0:
        problems.append(
            f"answers.per_prompt={answers.per_prompt}: greedy answers to a prompt are all equal; set "
            "generation.temperature above 0, or answers.per_prompt=1"
        )
    if generation.tool_calls and not any(isinstance(source, ChatDataConfig) for source in sources):
        problems.append(
            f"generation.tool_calls={generation.tool_calls}: data.kind={data.kind} has no tool calls to compare with; "
            "set it to 0, or use conversations (data=chat_jsonl)"
        )
    return problems


def _stages_of(data: DataConfig) -> list[StageConfig]:
    return data.stages if isinstance(data, MixtureDataConfig) else []


def _sources_of_cut_rows(training: TrainingConfig, data: DataConfig) -> dict[str, list[DataConfig]]:
    """Return the settings that cut rows into shorter ones, as KEY=VALUE, with the sources of these rows."""
    sources = data.sources if isinstance(data, MixtureDataConfig) else {"": data}
    found = {}
    if training.seq_len_ramp:
        found[f"training.seq_len_ramp={training.seq_len_ramp}"] = list(sources.values())
    for number, stage in enumerate(_stages_of(data)):
        if stage.seq_len not in (None, training.seq_len):
            drawn = [source for name, source in sources.items() if not stage.weights or stage.weights.get(name)]
            found[f"data.stages[{number}].seq_len={stage.seq_len}"] = drawn
    return found


def _cut_problems(training: TrainingConfig, data: DataConfig) -> list[str]:
    """Require plain text of rows that are cut: a cut sample of another kind would lose its prompt."""
    return [
        f"{key}: cuts rows into shorter ones, which would separate answers from their prompts under "
        f"data.kind={source.kind}; use data=text or data=tokens, or remove it"
        for key, sources in _sources_of_cut_rows(training, data).items()
        for source in sources
        if not isinstance(source, TextDataConfig | TokensDataConfig)
    ]


def _frozen_problems(training: TrainingConfig, model: ModelConfig, peft: PeftConfig | None) -> list[str]:
    """Reject a choice of trained parameters, and new tokens, beside adapters, under which all weights are frozen."""
    if peft is None or not peft.adapts:
        return []
    problems = []
    if model.new_tokens and not peft.modules_to_save:
        problems.append(
            "peft.modules_to_save=[]: the embedding is frozen, so that the tokens of model.new_tokens would not be "
            "learned; set peft.modules_to_save=[embed_tokens,lm_head]"
        )
    return problems + [
        f"training.{name}={patterns}: peft.method={peft.method} freezes every weight of the model; choose what it "
        "trains by peft.targets and peft.modules_to_save, or set peft=none"
        for name, patterns in (("trainable", training.trainable), ("freeze", training.freeze))
        if patterns
    ]


def _stage_problems(
    data: DataConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig | None,
    parallelism: ParallelismConfig,
    mesh: MeshShape,
) -> list[str]:
    """Require stages within the run, lengths that rows can be cut to, and one schedule of the learning rate."""
    problems = training.stage_end_problems(_stages_of(data), training.max_steps)
    for number, stage in enumerate(_stages_of(data)):
        key, length = f"data.stages[{number}].seq_len", stage.seq_len
        if length is not None:
            if training.seq_len % length:
                problems.append(
                    f"{key}={length}: must divide training.seq_len={training.seq_len}, as each row is cut into rows "
                    "of this length; change either"
                )
            if training.seq_len_ramp:
                problems.append(
                    f"{key}={length}: training.seq_len_ramp={training.seq_len_ramp} also sets the length of rows; "
                    "remove one of them"
                )
            problems += row_problems(key, length, parallelism, mesh)
        if stage.lr_ratio is not None and optimizer is not None and optimizer.schedule is not Schedule.constant:
            problems.append(
                f"data.stages[{number}].lr_ratio={stage.lr_ratio:g}: changes a constant learning rate, but "
                f"optimizer.schedule={optimizer.schedule}; set optimizer.schedule=constant, or remove lr_ratio"
            )
    return problems


def _best_checkpoint_problems(checkpoint: CheckpointConfig, training: TrainingConfig) -> list[str]:
    """Require an evaluation at every checkpoint step, so that all checkpoints can be compared."""
    if not checkpoint.keep_best:
        return []
    if training.eval_every == 0:
        return [
            "checkpoint.keep_best=true: needs an evaluation of each checkpoint, but training.eval_every=0; set "
            "training.eval_every"
        ]
    if checkpoint.every == 0 or checkpoint.every % training.eval_every:
        return [
            f"checkpoint.keep_best=true: needs checkpoint.every={checkpoint.every} to be a multiple of "
            f"training.eval_every={training.eval_every}, so that each checkpoint has an evaluation; change "
            "checkpoint.every or training.eval_every"
        ]
    return []


def _profile_problems(profile: ProfileConfig, training: TrainingConfig, world_size: int | None) -> list[str]:
    """Require profiled steps and ranks to exist; `world_size` is None if unknown."""
    if not profile.enabled:
        return []
    problems = [] if training.max_steps is None else profile.end_problems(training, training.max_steps)
    if world_size is not None and (absent := [rank for rank in profile.ranks if rank >= world_size]):
        problems.append(
            f"logging.profile.ranks={profile.ranks}: rank {absent[0]} does not exist, ranks are 0 to "
            f"{world_size - 1}; change logging.profile.ranks"
        )
    return problems


def tracker_problems(logging: LoggingConfig) -> list[str]:
    """Require the packages of the enabled trackers, which are optional, to be installed."""
    needed = {}  # setting -> (package, command that installs it, value that disables it)
    if logging.wandb.mode is not WandbMode.disabled:
        needed[f"logging.wandb.mode={logging.wandb.mode}"] = ("wandb", "pip install 'meshbook[wandb]'", "disabled")
    if logging.tensorboard:
        needed["logging.tensorboard=true"] = ("tensorboard", "pip install 'meshbook[tensorboard]'", "false")
    if logging.mlflow.enabled:
        needed["logging.mlflow.enabled=true"] = ("mlflow", "pip install 'meshbook[mlflow]'", "false")
    if logging.trackio.enabled:
        needed["logging.trackio.enabled=true"] = ("trackio", "pip install 'meshbook[trackio]'", "false")
    return [
        f"{setting}: {package} is not installed; run {install}, or set it to {disabled}"
        for setting, (package, install, disabled) in needed.items()
        if importlib.util.find_spec(package) is None
    ]


def harness_problems(tasks: TasksConfig) -> list[str]:
    """Require lm-eval, which is optional, to be installed if there are tasks."""
    if not tasks.tasks or importlib.util.find_spec("lm_eval") is not None:
        return []
    return [
        f"evaluation.tasks={tasks.tasks}: lm-eval is not installed; run pip install 'meshbook[evaluation]', or set it "
        "to []"
    ]


def _optimizer_problems(optimizer: OptimizerConfig, model: ModelConfig, peft: PeftConfig | None) -> list[str]:
    """Reject 8-bit moments for float64 weights, and Muon for adapters.

    torchao computes updates in float32. The product of two orthogonalized low-rank matrices is not an orthogonalized
    update.
    """
    if isinstance(optimizer, AdamW8bitConfig) and model.dtype == DType.float64:
        return [
            f"optimizer.kind={optimizer.kind}: computes updates in float32, less exact than model.dtype={model.dtype}; "
            "set optimizer=adamw, or model.dtype=float32"
        ]
    if peft is None or not peft.adapts or not isinstance(optimizer, MuonConfig):
        return []
    return [
        f"optimizer.kind={optimizer.kind}: Muon orthogonalizes the update of whole matrices, not of the two factors of "
        f"peft.method={peft.method}; set optimizer=adamw, or peft=none"
    ]


def _adapter_problems(peft: PeftConfig, evaluation: EvaluationConfig) -> list[str]:
    """Require a checkpoint to load the adapters from."""
    if not peft.adapts or evaluation.checkpoint is not None or peft.path is not None:
        return []
    return [
        f"peft.method={peft.method}: evaluation.checkpoint=null provides no trained adapters to evaluate; set "
        "it to a checkpoint (.../checkpoints/step_N), peft.path to an adapter, or peft=none"
    ]
