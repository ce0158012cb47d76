"""From a config to a model that is ready for its first step.

prepare.py           prepare: one ordered function; prepared.py: Prepared, StepSettings
precision.py         the type of matmuls
recompute_policy.py  what activation checkpointing `auto` stands for, by an estimate of memory
router_loss.py       the auxiliary loss of a mixture of experts' routers
flops.py             FLOPs of a step and the devices' peak: what the MFU is made of
attention_report.py  the attention kernel of a run, and what float8 changes of its loss
"""
