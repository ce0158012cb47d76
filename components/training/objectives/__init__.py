"""Objectives: loss functions that map the model's outputs and a batch to a loss sum and a count of units.

contract.py         Objective and TokenLoss: the interface to train_step, evaluate, pipelines and LM heads
cross_entropy.py    CrossEntropy: the loss of a target token; vocab-parallel and chunked
next_token.py       NextToken: mean cross-entropy with label smoothing and z-loss
preference.py       Preference: DPO; reference_model.py: log-probabilities under the reference model, computed once
distillation.py     Distillation: divergence from a teacher's distribution; teacher.py: the teacher on the same mesh
divergence.py       KL and Jensen-Shannon divergences; top_k.py: from the most likely tokens only
stored_teacher.py   StoredDistillation: from files, which teacher_store.py writes
sequence.py         Classification, Reward: losses of a score head at the last token of each row
loss_head.py        LM heads that take targets and return losses instead of logits; chunked_loss.py: chunked matmuls
"""

from components.training.objectives.contract import HeadOutput, Objective, RowScores, RowWeights, TokenLoss, Vocabulary
from components.training.objectives.cross_entropy import PLAIN, CrossEntropy, NextToken

__all__ = [
    "PLAIN",
    "CrossEntropy",
    "HeadOutput",
    "NextToken",
    "Objective",
    "RowScores",
    "RowWeights",
    "TokenLoss",
    "Vocabulary",
]
