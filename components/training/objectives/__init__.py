"""What is optimized: each maps what a model's head produces, and a batch, to a sum of losses and a count of units.

contract.py         Objective and TokenLoss: what train_step, evaluate, the pipeline and the heads ask of one
cross_entropy.py    CrossEntropy: the loss of a target token, vocab-parallel and in chunks
next_token.py       NextToken: the mean of them, with label smoothing and z-loss
preference.py       Preference: DPO; reference_model.py: log-probabilities under the reference, computed once
loss_head.py        a model that takes targets and returns losses instead of logits (chunked_loss.py: in chunks)
"""

from components.training.objectives.contract import Objective, RowScores, RowWeights, TokenLoss, Vocabulary
from components.training.objectives.cross_entropy import CrossEntropy
from components.training.objectives.next_token import PLAIN, NextToken

__all__ = ["PLAIN", "CrossEntropy", "NextToken", "Objective", "RowScores", "RowWeights", "TokenLoss", "Vocabulary"]
