"""Closed formulas of the memory and time of an optimizer step. Imports no torch.

families.py       structure of the decoder layers of model types
architecture.py   weights and FLOPs of a model, from its sizes and its family
workload.py       what one rank computes in a step: model, mesh, batch and policies
layer_memory.py   parameters of a layer on a rank, and bytes that it saves for the backward
memory.py         peak memory of the fullest rank
policies.py       what `auto` resolves to for recomputation and gradient reduction, by that memory
hardware.py       a device, from a file of conf/gpu, and its time for a layer's operations and for the head
communication.py  collectives of the mesh axes
pipeline.py       order, idle time and timeline of the pipeline schedules
step_time.py      time of an optimizer step
ranking.py        that memory against the device; meshes and policies, the fastest first, and why others are left out
"""
