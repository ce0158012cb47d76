"""Optimizer construction and updates.

optim.py            optimizers of a config, their parameter groups, Lion, AdamW with 8-bit moments
muon.py             Muon and NorMuon
matrix_exchange.py  the exchange of sharded matrices with the ranks that orthogonalize them; matrices in a fused weight
gradients.py        equal gradients of tp replicas, the global gradient norm over mixed meshes, clipping
"""
