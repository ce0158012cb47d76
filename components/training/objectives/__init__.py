"""Objectives: loss functions that map the model's outputs and a batch to a loss sum and a count of units.

base.py             TokenObjective, RowObjective and TokenLoss: the interface to train_step, evaluate and LM heads
cross_entropy.py    NextToken, CrossEntropy: label smoothing and z-loss; Classification, Reward: losses of a score head
preference.py       Preference: DPO, SimPO, ORPO and KTO
reference_model.py  log-probabilities under the reference model, computed once
distillation.py     Distillation: divergence from a teacher's distribution, or from its most likely tokens only
policy.py           losses of sampled answers by their rewards: GRPO and its relatives
teacher.py          the teacher on the same mesh; StoredDistillation: from files
teacher_store.py    writing of these files
loss_head.py        LM heads that take targets and return losses instead of logits
chunked_loss.py     the LM head's matmuls and losses, one chunk of tokens at a time
"""

from components.training.objectives.base import (
    Chunk,
    HeadOutput,
    RowObjective,
    RowScores,
    RowWeights,
    TokenLoss,
    TokenObjective,
    Vocabulary,
    row_objective,
)
from components.training.objectives.cross_entropy import PLAIN, CrossEntropy, NextToken

__all__ = [
    "PLAIN",
    "Chunk",
    "CrossEntropy",
    "HeadOutput",
    "NextToken",
    "RowObjective",
    "RowScores",
    "RowWeights",
    "TokenLoss",
    "TokenObjective",
    "Vocabulary",
    "row_objective",
]
