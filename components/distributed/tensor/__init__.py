"""Tensor parallelism.

apply_tp.py         apply_tensor_parallel: applies a plan to a model; styles of linear layers with LoRA adapters
tp_plan.py          plans: transformers' plan of a model, its family's or the user's, adjusted to its heads and checked
tensor_parallel.py  parallel styles that torch does not have
"""
