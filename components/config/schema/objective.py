"""`objective`: the training loss, one class per kind; `teacher`: the model whose distribution is learned."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from components.config.schema.model import DType
from components.protocol.errors import above, at_least, own_kind, raise_all, within


class ObjectiveKind(StrEnum):
    """next_token: cross-entropy of the next token; distillation: a teacher's distribution of the next token; dpo, simpo
    and orpo: preference pairs; kto: labeled answers; classification: the label of a text; reward: a reward model; grpo,
    dr_grpo, dapo, cispo, gspo, rloo and reinforce_pp: rewards of sampled answers."""

    next_token = "next_token"
    distillation = "distillation"
    dpo = "dpo"
    simpo = "simpo"
    orpo = "orpo"
    kto = "kto"
    classification = "classification"
    reward = "reward"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    cispo = "cispo"
    gspo = "gspo"
    rloo = "rloo"
    reinforce_pp = "reinforce_pp"


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Base of every objective. A recipe accepts the kinds that the annotation of its config field admits."""

    recipe: ClassVar[str]
    """The recipe that trains with it, for error messages."""
    kind: ObjectiveKind
    """Selects one of the subclasses below."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        return own_kind("objective", self)


@dataclass(kw_only=True, slots=True)
class NextTokenConfig(ObjectiveConfig):
    """Cross-entropy of the next token. The held-out loss is always the plain cross-entropy, without the terms below."""

    recipe: ClassVar[str] = "recipes/finetune.py"
    kind: ObjectiveKind = ObjectiveKind.next_token
    """next_token."""
    label_smoothing: float = 0.0
    """Share of each target distribution that is spread evenly over the vocabulary, in [0, 1)."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, the squared log of the softmax denominator (logsumexp of the logits); 1e-4 is common
    in pretraining; 0: none."""

    def _problems(self) -> list[str]:
        problems = [*ObjectiveConfig._problems(self), *at_least("objective.z_loss", self.z_loss, 0)]
        if not 0 <= self.label_smoothing < 1:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 1)")
        return problems


class Divergence(StrEnum):
    """Divergences of the student's distribution from the teacher's.

    forward_kl: KL(teacher || student), covers all that the teacher considers likely; reverse_kl: KL(student ||
    teacher), keeps to what the teacher considers likely; jensen_shannon: the mean of the KL divergences of both from
    their average.
    """

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jensen_shannon = "jensen_shannon"


@dataclass(kw_only=True, slots=True)
class DistillationConfig(ObjectiveConfig):
    """Distillation of a teacher (Hinton et al. 2015): (1 - cross_entropy_weight) x temperature^2 x divergence +
    cross_entropy_weight x cross-entropy, averaged over target tokens."""

    recipe: ClassVar[str] = "recipes/distill.py"
    kind: ObjectiveKind = ObjectiveKind.distillation
    """distillation."""
    divergence: Divergence = Divergence.forward_kl
    """forward_kl, reverse_kl or jensen_shannon."""
    temperature: float = 1.0
    """Temperature of both distributions in the divergence, greater than 0; above 1 it emphasizes unlikely tokens."""
    cross_entropy_weight: float = 0.0
    """Weight of the cross-entropy of the data's own targets, in [0, 1)."""

    def _problems(self) -> list[str]:
        problems = [*ObjectiveConfig._problems(self), *above("objective.temperature", self.temperature, 0)]
        if not 0 <= self.cross_entropy_weight < 1:
            problems.append(
                f"objective.cross_entropy_weight={self.cross_entropy_weight}: must be in [0, 1); to train on the "
                "cross-entropy alone, use recipes/finetune.py"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class PreferenceConfig(ObjectiveConfig):
    """Base of the objectives of recipes/dpo.py, which compare answers."""

    recipe: ClassVar[str] = "recipes/dpo.py"
    beta: float = 0.1
    """Scale of the rewards, greater than 0. Its meaning differs between the kinds: see each of them."""

    def _problems(self) -> list[str]:
        return [*ObjectiveConfig._problems(self), *above("objective.beta", self.beta, 0)]


@dataclass(kw_only=True, slots=True)
class PairConfig(PreferenceConfig):
    """Base of the objectives on pairs of a chosen and a rejected answer."""

    sft_weight: float = 0.0
    """Weight of the mean negative log-probability per token of the chosen answer, added to the loss of each pair."""

    def _problems(self) -> list[str]:
        return [*PreferenceConfig._problems(self), *at_least("objective.sft_weight", self.sft_weight, 0)]


class Reference(StrEnum):
    """How rows get their log-probabilities under the reference model, the model before training."""

    precomputed = "precomputed"
    adapters_off = "adapters_off"
    frozen_copy = "frozen_copy"


class PairLoss(StrEnum):
    """Losses of a DPO pair as a function of the margin between its rewards."""

    sigmoid = "sigmoid"
    hinge = "hinge"
    ipo = "ipo"


@dataclass(kw_only=True, slots=True)
class DPOConfig(PairConfig):
    """Direct preference optimization (Rafailov et al. 2023). beta is the strength of the implicit KL penalty towards
    the reference model; smaller values let the policy move further away."""

    kind: ObjectiveKind = ObjectiveKind.dpo
    """dpo."""
    reference: Reference = Reference.precomputed
    """Log-probabilities under the reference model. precomputed: one pass over all data before training, saved in the
    run directory (8 bytes per row); adapters_off: at every step, by the model without its adapters; frozen_copy: at
    every step, by a second copy of the weights on the same mesh."""
    loss: PairLoss = PairLoss.sigmoid
    """sigmoid: the paper's; hinge (SLiC); ipo: squared distance of the per-token margin from 1 / (2 beta)."""
    label_smoothing: float = 0.0
    """Assumed share of pairs whose preference label is flipped (conservative DPO), in [0, 0.5); sigmoid only."""

    def _problems(self) -> list[str]:
        problems = PairConfig._problems(self)
        if not 0 <= self.label_smoothing < 0.5:
            problems.append(f"objective.label_smoothing={self.label_smoothing}: must be in [0, 0.5)")
        elif self.label_smoothing and self.loss is not PairLoss.sigmoid:
            problems.append(
                f"objective.label_smoothing={self.label_smoothing}: objective.loss={self.loss} has no label smoothing; "
                "set it to 0, or set objective.loss=sigmoid"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class SimPOConfig(PairConfig):
    """Simple preference optimization (Meng et al. 2024): mean log-probabilities per token, without a reference model.
    beta scales them."""

    kind: ObjectiveKind = ObjectiveKind.simpo
    """simpo."""
    beta: float = 2.0
    """Scale of the rewards, greater than 0; the paper uses 2 to 10."""
    gamma: float = 1.0
    """Margin between the rewards that the loss aims for, at least 0; the paper uses 0.3 to 1.6."""

    def _problems(self) -> list[str]:
        return [*PairConfig._problems(self), *at_least("objective.gamma", self.gamma, 0)]


@dataclass(kw_only=True, slots=True)
class ORPOConfig(PairConfig):
    """Odds-ratio preference optimization (Hong et al. 2024): supervised fine-tuning on the chosen answers plus beta
    (the paper's lambda) times the odds-ratio loss, without a reference model."""

    kind: ObjectiveKind = ObjectiveKind.orpo
    """orpo."""
    sft_weight: float = 1.0
    """Weight of the mean negative log-probability per token of the chosen answer; 1 in the paper."""


@dataclass(kw_only=True, slots=True)
class KTOConfig(PreferenceConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024) on single answers with a label (data.label_column)."""

    kind: ObjectiveKind = ObjectiveKind.kto
    """kto."""
    reference: Reference = Reference.precomputed
    """Log-probabilities under the reference model. precomputed: one pass over all data before training, saved in the
    run directory (8 bytes per row); adapters_off: at every step, by the model without its adapters; frozen_copy: at
    every step, by a second copy of the weights on the same mesh."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable answers, greater than 0. The paper recommends a ratio of desirable_weight x
    desirable answers to undesirable_weight x undesirable answers between 1 and 3/2."""
    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable answers, greater than 0."""

    def _problems(self) -> list[str]:
        return [
            *PreferenceConfig._problems(self),
            *above("objective.desirable_weight", self.desirable_weight, 0),
            *above("objective.undesirable_weight", self.undesirable_weight, 0),
        ]


@dataclass(kw_only=True, slots=True)
class ScoreConfig(ObjectiveConfig):
    """Base of the objectives of recipes/classify.py, whose model has a score head instead of an LM head."""

    recipe: ClassVar[str] = "recipes/classify.py"


@dataclass(kw_only=True, slots=True)
class ClassificationConfig(ScoreConfig):
    """Cross-entropy of the label, averaged over texts; data=labels."""

    kind: ObjectiveKind = ObjectiveKind.classification
    """classification."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(ScoreConfig):
    """Bradley-Terry loss -log sigmoid(reward of the chosen answer - reward of the rejected one), averaged over pairs
    (Ouyang et al. 2022); data=preferences."""

    kind: ObjectiveKind = ObjectiveKind.reward
    """reward."""
    center_weight: float = 0.0
    """Weight of the squared sum of a pair's rewards, at least 0, which keeps their mean near 0 (Eisenstein et al.
    2023); the paper uses 0.01."""

    def _problems(self) -> list[str]:
        return [*ObjectiveConfig._problems(self), *at_least("objective.center_weight", self.center_weight, 0)]


class KLEstimator(StrEnum):
    """Estimators of the KL divergence from the reference (Schulman 2020), of d = log-probability under the reference -
    log-probability. k1: -d, in the reward; k2: d^2 / 2, in the loss; k3: exp(d) - d - 1, in the loss."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class AdvantageScale(StrEnum):
    """What advantages are divided by: the standard deviation of the rewards of their group or of the whole batch."""

    group = "group"
    batch = "batch"
    none = "none"


class Baseline(StrEnum):
    """What is subtracted from a reward: the mean of its group, the mean of the others in its group, or nothing."""

    mean = "mean"
    leave_one_out = "leave_one_out"
    none = "none"


@dataclass(kw_only=True, slots=True)
class PolicyConfig(ObjectiveConfig):
    """Base of the objectives of recipes/grpo.py: advantages, which follow from rewards, weight the tokens of sampled
    answers. r is the probability of a token divided by its probability when it was sampled, which is 1 unless answers
    serve several optimizer steps (rollouts.batches, rollouts.passes)."""

    recipe: ClassVar[str] = "recipes/grpo.py"
    clip_low: float = 0.2
    """r is clipped below 1 - clip_low, in [0, 1]."""
    clip_high: float = 0.2
    """r is clipped above 1 + clip_high, at least 0."""
    beta: float = 0.0
    """Weight of the KL divergence from the reference, the model before training; at least 0."""
    kl: KLEstimator = KLEstimator.k3
    """Estimator of that divergence. k1: subtracted from the reward; k2: added to the loss, its gradient is that of
    KL(policy || reference); k3: added to the loss, its gradient is that of KL(reference || policy)."""
    scale: AdvantageScale = AdvantageScale.group
    """Divide advantages by the standard deviation of the rewards of their group, or of all answers of the batch (each +
    1e-4), or not (none)."""
    baseline: Baseline = Baseline.mean
    """Subtract from each reward the mean of its group, the mean of the others in its group, or nothing (none)."""
    reference: Reference | None = None
    """Log-probabilities under the reference, with beta above 0. adapters_off: by the model without its adapters;
    frozen_copy: by a second copy of the weights on the same mesh; null: adapters_off with adapters, else
    frozen_copy."""

    def _problems(self) -> list[str]:
        problems = [
            *ObjectiveConfig._problems(self),
            *within("objective.clip_low", self.clip_low, 0, 1),
            *at_least("objective.clip_high", self.clip_high, 0),
            *at_least("objective.beta", self.beta, 0),
        ]
        if self.reference is Reference.precomputed:
            problems.append(
                "objective.reference=precomputed: the answers are sampled during the run, so their log-probabilities "
                "cannot be computed before; set it to adapters_off, frozen_copy or null"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class GRPOConfig(PolicyConfig):
    """Group relative policy optimization (Shao et al. 2024): mean over answers of the mean over tokens of
    -min(r x advantage, clip(r) x advantage)."""

    kind: ObjectiveKind = ObjectiveKind.grpo
    """grpo."""


@dataclass(kw_only=True, slots=True)
class DrGRPOConfig(PolicyConfig):
    """GRPO without its biases of length and of difficulty (Liu et al. 2025): sum over tokens divided by answers x
    rollouts.max_new_tokens, advantages not divided by a deviation."""

    kind: ObjectiveKind = ObjectiveKind.dr_grpo
    """dr_grpo."""
    scale: AdvantageScale = AdvantageScale.none
    """Divide advantages by the standard deviation of the rewards of their group, or of the batch, or not."""


@dataclass(kw_only=True, slots=True)
class DAPOConfig(PolicyConfig):
    """The token loss of DAPO (Yu et al. 2025): GRPO's loss as a mean over all tokens of the step, with a higher upper
    bound. Its other parts: rollouts.filter=zero_variance, rollouts.overlong=penalty."""

    kind: ObjectiveKind = ObjectiveKind.dapo
    """dapo."""
    clip_high: float = 0.28
    """r is clipped above 1 + clip_high, at least 0."""


@dataclass(kw_only=True, slots=True)
class CISPOConfig(PolicyConfig):
    """Clipped importance-sampling weights (MiniMax 2025): mean over all tokens of -min(r, 1 + clip_high) x advantage x
    log-probability, where the first factor has no gradient, so that every token has one."""

    kind: ObjectiveKind = ObjectiveKind.cispo
    """cispo."""
    clip_low: float = 1.0
    """Not used: r is not clipped from below."""
    clip_high: float = 4.0
    """r is at most 1 + clip_high, at least 0."""


@dataclass(kw_only=True, slots=True)
class GSPOConfig(PolicyConfig):
    """Group sequence policy optimization (Zheng et al. 2025): GRPO with one r for all tokens of an answer, their
    geometric mean, and narrow bounds."""

    kind: ObjectiveKind = ObjectiveKind.gspo
    """gspo."""
    clip_low: float = 3e-4
    """r is clipped below 1 - clip_low, in [0, 1]."""
    clip_high: float = 4e-4
    """r is clipped above 1 + clip_high, at least 0."""


@dataclass(kw_only=True, slots=True)
class RLOOConfig(PolicyConfig):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024): mean over answers of -min(r x advantage, clip(r)
    x advantage), where r is that of the whole answer, the product over its tokens."""

    kind: ObjectiveKind = ObjectiveKind.rloo
    """rloo."""
    kl: KLEstimator = KLEstimator.k1
    """k1: the divergence is subtracted from the reward; k2 and k3: added to the loss."""
    scale: AdvantageScale = AdvantageScale.none
    """Divide advantages by the standard deviation of the rewards of their group, or of the batch, or not."""
    baseline: Baseline = Baseline.leave_one_out
    """Subtract from each reward the mean of the others in its group, the mean of the group, or nothing."""


@dataclass(kw_only=True, slots=True)
class ReinforcePPConfig(PolicyConfig):
    """REINFORCE++ (Hu 2025): no groups; the advantage of a token is the sum of what follows in its answer, the reward
    at the last token - beta x the divergence at each, standardized over all tokens of the batch. Loss as in dapo."""

    kind: ObjectiveKind = ObjectiveKind.reinforce_pp
    """reinforce_pp."""
    kl: KLEstimator = KLEstimator.k1
    """k1: the divergence is subtracted from the reward of its token; k2 and k3: added to the loss."""
    scale: AdvantageScale = AdvantageScale.batch
    """batch: standardize the advantages of all tokens; group and none: as for the other objectives."""
    baseline: Baseline = Baseline.none
    """Subtract from each reward the mean of its group (REINFORCE++-baseline), of the others in it, or nothing."""


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """The teacher of recipes/distill.py: a causal LM with the student's tokenizer on the same mesh, or its most likely
    tokens, stored before. Exactly one of path and stored must be set."""

    path: str | None = None
    """Hub name (owner/model), local folder, .gguf file, or package:NAME/FILE for a file in an installed package."""
    stored: str | None = None
    """Run directory of scripts/teacher.py, which stored the teacher's most likely tokens for the same data; the teacher
    is not loaded then."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null: the default branch."""
    tokenizer: str | None = None
    """Where the teacher's tokenizer comes from: like path; bytes: one token per byte; null: from path."""
    dtype: DType | None = None
    """Dtype of the stored weights: float32, bfloat16 or float64; null: model.dtype."""
    trust_remote_code: bool = False
    """Allow transformers to run Python code from the teacher's repository; read that code first."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        problems = []
        if self.path is None and self.stored is None:
            problems.append(
                "teacher.path: not set; set it to a model, or set teacher.stored to a run directory of "
                "scripts/teacher.py"
            )
        if self.path is not None and self.stored is not None:
            problems.append(
                f"teacher.stored={self.stored}: teacher.path={self.path} is set too; set one of them to null, as the "
                "probabilities come either from a model or from a folder"
            )
        if self.dtype == DType.auto:
            problems.append("teacher.dtype=auto: must be float32, bfloat16 or float64, or null for model.dtype")
        return problems


@dataclass(kw_only=True, slots=True)
class TopKTeacherConfig(TeacherConfig):
    """The teacher of scripts/teacher.py, which stores its most likely tokens."""

    top_k: int = 64
    """Most likely tokens to store for each target token, at least 1; 8 bytes each. The probability of all others is
    stored as one number."""

    def _problems(self) -> list[str]:
        problems = at_least("teacher.top_k", self.top_k, 1)
        if self.stored is not None:
            return [
                *problems,
                f"teacher.stored={self.stored}: scripts/teacher.py runs a model and stores its most likely tokens in "
                "run.dir; set teacher.path, and remove teacher.stored",
            ]
        if self.path is None:
            problems.append("teacher.path: not set; set it to the model whose most likely tokens to store")
        if self.dtype == DType.auto:
            problems.append("teacher.dtype=auto: must be float32, bfloat16 or float64, or null for model.dtype")
        return problems
