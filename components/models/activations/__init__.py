"""What decoder layers save for the backward.

selective_recompute.py  operators whose outputs selective activation checkpointing keeps
activation_offload.py   offload_activations: saved activations wait in host memory
"""
