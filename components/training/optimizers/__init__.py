"""Optimizer construction and updates.

optim.py        AdamW with weight-decay groups, learning-rate schedules, updates that skip non-finite gradients
masked_step.py  updates that skip non-finite gradients, for any optimizer
gradients.py    equal gradients of tp replicas, the global gradient norm over mixed meshes, clipping
"""
