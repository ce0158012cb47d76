"""Optimizer construction and updates.

optim.py           optimizers of a config, learning-rate schedules, updates that skip non-finite gradients
adamw8bit.py       AdamW with 8-bit moments
muon.py            Muon; owners.py: the exchange of sharded matrices with the ranks that orthogonalize them
fused_matrices.py  the matrices in a fused weight, which Muon orthogonalizes one by one
masked_step.py     updates that skip non-finite gradients, for any optimizer
gradients.py       equal gradients of tp replicas, the global gradient norm over mixed meshes, clipping
weight_average.py  exponential moving average of the trained weights
"""
