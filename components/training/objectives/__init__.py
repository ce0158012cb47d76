"""What is optimized: each maps what a model's head produces, and a batch, to a sum of losses and a count of units.

objective.py      Objective and TokenLoss: what train_step, evaluate, the pipeline and the heads ask of one
cross_entropy.py  CrossEntropy: the loss of a target token, vocab-parallel and in chunks
next_token.py     NextToken: the mean of them, with label smoothing and z-loss
"""

from components.training.objectives.cross_entropy import CrossEntropy
from components.training.objectives.next_token import PLAIN, NextToken
from components.training.objectives.objective import Objective, RowScores, RowWeights, TokenLoss, Vocabulary

__all__ = ["PLAIN", "CrossEntropy", "NextToken", "Objective", "RowScores", "RowWeights", "TokenLoss", "Vocabulary"]
