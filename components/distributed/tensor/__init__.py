"""Tensor parallelism.

apply_tp.py         apply_tensor_parallel: applies a plan to a model
tp_plan.py          plans: transformers' plan of a model or the user's, adjusted to its heads, and their checks
tensor_parallel.py  parallel styles that torch does not have
adapters.py         parallel styles of linear layers with LoRA adapters
"""
