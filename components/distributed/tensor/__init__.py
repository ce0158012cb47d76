"""Tensor parallelism.

apply_tp.py         apply_tensor_parallel: a plan applied to a model
tp_plan.py          the plan of a model: transformers' own, the user's, or one for its family
tensor_parallel.py  styles: how a layer's weight and input are sharded
adapters.py         styles of layers with LoRA adapters
"""
