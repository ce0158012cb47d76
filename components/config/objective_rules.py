"""Rules about objectives: preferences, scores, distillation and rewards, and the data and models that they need."""

from __future__ import annotations

from collections.abc import Iterable

from components.config.schema.data import DataConfig, LabelsDataConfig, Overlong, PreferencesDataConfig
from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.objective import (
    AdvantageScale,
    Baseline,
    DPOConfig,
    GSPOConfig,
    KLEstimator,
    KTOConfig,
    PreferenceConfig,
    Reference,
    ReinforcePPConfig,
    RewardConfig,
    RLOOConfig,
    ScoreConfig,
    TeacherConfig,
)
from components.config.schema.parallelism import MeshShape
from components.config.schema.recipes import GrpoConfig, RecipeConfig, policy_reference
from components.config.schema.rollouts import CutAnswers, GroupFilter, Normalization
from components.config.schema.run import PeftConfig
from components.config.schema.training import GenerationConfig, TrainingConfig
from components.protocol.errors import field_values


def preference_problems(
    objective: PreferenceConfig, data: DataConfig, model: ModelConfig, peft: PeftConfig | None
) -> list[str]:
    """Require the data that a preference objective compares, and what its two forward passes and its reference need."""
    kind, problems = objective.kind, []
    label = data.label_column if isinstance(data, PreferencesDataConfig) else None
    if isinstance(objective, KTOConfig) and label is None:
        problems.append(
            f"objective.kind={kind}: needs answers with a label; set data.label_column to the column with true and "
            "false, and data.completion_column to that with the answers"
        )
    if not isinstance(objective, KTOConfig) and label is not None:
        problems.append(
            f"data.label_column={label}: objective.kind={kind} compares pairs of answers; remove it, or set "
            "objective=kto"
        )
    adapts = peft is not None and peft.adapts
    reference = objective.reference if isinstance(objective, DPOConfig | KTOConfig) else None
    if reference is Reference.adapters_off and not adapts:
        problems.append(
            f"objective.reference={reference}: the model has no adapters; set objective.reference to precomputed or "
            "frozen_copy, or peft=lora"
        )
    for key in ("path", "modules_to_save") if reference is Reference.adapters_off else ():
        if peft is not None and (value := field_values(peft)[key]):
            problems.append(
                f"objective.reference={reference}: the model without its adapters is not the one that training begins "
                f"with, because of peft.{key}={value}; set objective.reference=precomputed"
            )
    if reference is Reference.frozen_copy and adapts:
        problems.append(
            f"objective.reference={reference}: the model without its adapters already is the reference, without a "
            "second copy; set objective.reference to adapters_off or precomputed"
            if peft is None or peft.path is None
            else f"objective.reference={reference}: the reference is the model with the adapter at peft.path, of which "
            "there is no second copy; set objective.reference=precomputed"
        )
    if peft is not None and peft.adapts and peft.dropout:
        problems.append(
            f"peft.dropout={peft.dropout}: the two forward passes of objective.kind={kind} would drop different "
            "values; set peft.dropout=0"
        )
    if model.loss == LossMethod.liger:
        problems.append("model.loss=liger: liger-kernel does not support per-row weights; set model.loss=chunked")
    return problems


def score_problems(
    objective: ScoreConfig, data: DataConfig, model: ModelConfig, generation: GenerationConfig
) -> list[str]:
    """Require the data that a score objective learns from, and reject settings that a score head does not have."""
    kind, problems = objective.kind, []
    if isinstance(objective, RewardConfig):
        if not isinstance(data, PreferencesDataConfig):
            problems.append(f"objective.kind={kind}: requires preference pairs; set data=preferences")
        elif data.label_column is not None:
            problems.append(
                f"data.label_column={data.label_column}: objective.kind={kind} requires pairs of answers; remove it"
            )
        elif data.pack:
            problems.append(
                f"data.pack=true: objective.kind={kind} compares the scores of neighboring rows with one answer each, "
                "but a packed row holds several; set data.pack=false"
            )
    elif not isinstance(data, LabelsDataConfig):
        problems.append(
            f"data.kind={data.kind}: objective.kind={kind} learns from labeled texts; set data=labels, or "
            "objective=reward for preference pairs"
        )
    if model.loss not in (LossMethod.auto, LossMethod.logits):
        problems.append(
            f"model.loss={model.loss}: there is no LM head; the loss of a score head needs few logits; set "
            "model.loss=auto"
        )
    if generation.prompts or (generation.samples and generation != GenerationConfig()):
        problems.append("generation: a model with a score head generates no text; remove generation.*")
    return problems


def distillation_problems(model: ModelConfig, teacher: TeacherConfig | None, cut_at: Iterable[str]) -> list[str]:
    """Return the problems of distillation, which computes the logits of student and teacher in the same chunks.

    Args:
        cut_at: Settings that cut rows into shorter ones, as KEY=VALUE.
    """
    problems = []
    if model.loss not in (LossMethod.auto, LossMethod.chunked):
        problems.append(
            f"model.loss={model.loss}: distillation computes the logits of student and teacher a chunk of tokens at a "
            "time; set model.loss=chunked"
        )
    if teacher is not None and teacher.stored is not None:
        problems += [
            f"{key}: cuts rows, but the probabilities in teacher.stored={teacher.stored} are those after the tokens of "
            "the whole row; remove it, or set teacher.path instead of teacher.stored"
            for key in cut_at
        ]
    return problems


def _unfit_training(training: TrainingConfig) -> list[str]:
    """Return the problems of settings of the training that sampled answers exclude."""
    problems = []
    if training.neftune_alpha:
        problems.append(
            f"training.neftune_alpha={training.neftune_alpha:g}: answers are sampled without this noise, so their "
            "probabilities would differ in training; set it to 0"
        )
    if training.skip_spikes is not None:
        problems.append(
            f"training.skip_spikes={training.skip_spikes:g}: losses of sampled answers are near 0, and gradients of "
            "equal rewards are 0, so that rounding, or the first rewards, would count as spikes; set it to null"
        )
    return problems


def policy_problems(cfg: RecipeConfig, mesh: MeshShape) -> list[str]:
    """Return the problems of a run that learns from rewards of sampled answers; none of another run."""
    if not isinstance(cfg, GrpoConfig):
        return []
    rollouts, training, problems = cfg.rollouts, cfg.training, list[str]()
    sizes = {f"training.batch_size_ramp[{i}].global_batch_size": size for i, (_, size) in enumerate(training.ramp)}
    sizes["training.global_batch_size"] = training.global_batch_size
    for key, size in sizes.items():
        if size % rollouts.group:
            near = -(-size // rollouts.group) * rollouts.group
            problems.append(
                f"{key}={size}: counts answers, and must be a multiple of rollouts.group={rollouts.group}, those of a "
                f"prompt; set {key}={near}, or change rollouts.group"
            )
    if training.batch_size_ramp and rollouts.updates > 1:
        problems.append(
            f"training.batch_size_ramp={training.batch_size_ramp}: the steps that share answers (rollouts.batches="
            f"{rollouts.batches}, rollouts.passes={rollouts.passes}) must be of one size; remove it, or set both to 1"
        )
    if training.epochs is not None and rollouts.filter is not GroupFilter.none:
        problems.append(
            f"training.epochs={training.epochs:g}: with rollouts.filter={rollouts.filter} a step draws as many prompts "
            "as it needs, so their number in an epoch gives no number of steps; set training.max_steps"
        )
    if rollouts.max_new_tokens >= training.seq_len:
        problems.append(
            f"rollouts.max_new_tokens={rollouts.max_new_tokens}: must be less than training.seq_len="
            f"{training.seq_len}, which holds an answer with its prompt; lower it, or raise training.seq_len"
        )
    if mesh.pp > 1 and rollouts.replay is None:
        problems.append(
            f"parallelism.pp={mesh.pp}: a pipeline generates one answer after another and has no cache of keys and "
            "values; set parallelism.pp=1, or train on stored answers: rollouts.replay=RUN"
        )
    problems += _unfit_training(training)
    limit = (cfg.reward.timeout_seconds + cfg.reward.retry_seconds) * len(cfg.reward.functions)
    if 0 < training.step_timeout_seconds <= limit:
        problems.append(
            f"training.step_timeout_seconds={training.step_timeout_seconds:g}: must exceed {limit:g}, as reward "
            f"functions may take that long (reward.timeout_seconds={cfg.reward.timeout_seconds:g} for each, and again "
            "for its answers one by one) while no rank computes; raise it, or lower reward.timeout_seconds"
        )
    if cfg.model.loss not in (LossMethod.auto, LossMethod.chunked):
        problems.append(
            f"model.loss={cfg.model.loss}: the losses of sampled tokens are computed a chunk of tokens at a time; set "
            "model.loss=chunked"
        )
    if cfg.data.overlong in (Overlong.truncate, Overlong.keep_last):
        problems.append(
            f"data.overlong={cfg.data.overlong}: a prompt that is cut is another one; set it to drop or refuse"
        )
    return problems + _advantage_problems(cfg) + _reference_problems(cfg)


def _advantage_problems(cfg: GrpoConfig) -> list[str]:
    """Require settings of advantages and divergence that have an effect together."""
    objective, problems = cfg.objective, []
    if cfg.reward.normalize is Normalization.normalize_then_sum:
        if len(cfg.reward.functions) == 1 and cfg.rollouts.overlong is not CutAnswers.penalty:
            problems.append(
                "reward.normalize=normalize_then_sum: weighs several functions, and reward.functions has one; remove it"
            )
        if (objective.scale, objective.baseline) != (AdvantageScale.group, Baseline.mean):
            problems.append(
                f"reward.normalize=normalize_then_sum: standardizes each function in its group, which replaces "
                f"objective.scale={objective.scale} and objective.baseline={objective.baseline}; set these to group "
                "and mean, or reward.normalize=sum_then_normalize"
            )
    is_of_answers = isinstance(objective, GSPOConfig | RLOOConfig) and cfg.rollouts.updates > 1
    if is_of_answers and objective.beta and objective.kl is not KLEstimator.k1:
        problems.append(
            f"objective.kl={objective.kl}: objective.kind={objective.kind} has one probability ratio for an answer, "
            "and its loss no term of tokens; set objective.kl=k1, which is subtracted from the reward"
        )
    if isinstance(objective, ReinforcePPConfig) and objective.scale is AdvantageScale.group:
        problems.append(
            "objective.scale=group: objective.kind=reinforce_pp standardizes the advantages of all tokens; set it to "
            "batch or none, or choose objective=grpo"
        )
    return problems


def _reference_problems(cfg: GrpoConfig) -> list[str]:
    """Require a reference that is the model before training."""
    objective, peft, problems = cfg.objective, cfg.peft, []
    reference = policy_reference(cfg)
    if objective.reference is not None and reference is None:
        problems.append(
            f"objective.reference={objective.reference}: has no effect with objective.beta=0; set objective.beta, or "
            "remove it"
        )
    if reference is Reference.adapters_off and not peft.adapts:
        problems.append(
            f"objective.reference={reference}: the model has no adapters; set it to frozen_copy or null, or peft=lora"
        )
    if reference is Reference.frozen_copy and peft.adapts:
        problems.append(
            f"objective.reference={reference}: the model without its adapters already is the reference, without a "
            "second copy; set it to adapters_off or null"
        )
    for key in ("path", "modules_to_save") if reference is not None and peft.adapts else ():
        if value := field_values(peft)[key]:
            problems.append(
                f"objective.beta={objective.beta:g}: its reference, the model without adapters, is not the one that "
                f"training begins with, because of peft.{key}={value}; set objective.beta=0, or merge the adapter into "
                "model.path with scripts/export.py first"
            )
    if peft.adapts and peft.dropout:
        problems.append(
            f"peft.dropout={peft.dropout}: answers are sampled without dropout, so their probabilities would differ in "
            "training; set it to 0"
        )
    return problems
