"""What is optimized: each maps what a model's head produces, and a batch, to a sum of losses and a count of units.

objective.py   Objective: what train_step, evaluate, the pipeline and the heads ask of one
next_token.py  NextToken: cross-entropy of the next token, with label smoothing and z-loss
"""

from components.training.objectives.next_token import NextToken
from components.training.objectives.objective import Objective

__all__ = ["NextToken", "Objective"]
