"""The update of the weights.

optim.py        AdamW with decay groups, learning-rate schedules, updates that skip non-finite gradients
masked_step.py  such an update for any optimizer
gradients.py    one gradient for the replicas over tp, the norm of all gradients over mixed meshes, clipping
"""
