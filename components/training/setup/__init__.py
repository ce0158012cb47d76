"""Construction of a model from a config, up to its first step.

prepare.py           prepare: build, parallelize and fill a model
prepared.py          Prepared, StepSettings: its results
precision.py         the compute dtype, autocast, and deterministic kernels
recompute_policy.py  `auto` of activation checkpointing and gradient reduction, from an estimate of memory
router_loss.py       the auxiliary loss of mixture-of-experts routers
flops.py             FLOPs of a step and the devices' peak, for the MFU
attention_report.py  the attention kernel a run uses, and the loss difference float8 causes
"""
