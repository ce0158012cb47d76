"""Optimizer construction and updates.

optim.py           optimizers of a config, learning-rate schedules, AdamW, updates that skip non-finite gradients
adamw8bit.py       AdamW with 8-bit moments
muon.py            Muon
owners.py          the exchange of sharded matrices with the ranks that orthogonalize them; matrices in a fused weight
gradients.py       equal gradients of tp replicas, the global gradient norm over mixed meshes, clipping
weight_average.py  exponential moving average of the trained weights
"""
