"""Closed formulas of the memory and time of an optimizer step. Imports no torch.

term.py            a figure with its formula and source
architecture.py    weights and FLOPs of a model, from its sizes and its family
workload.py        what one rank computes in a step: model, mesh, batch, policies
activations.py     bytes that a layer saves for the backward
memory.py          peak memory of the fullest rank
memory_check.py    that memory against the device, before a run starts
hardware.py        a device, from a file of conf/gpu
implementation.py  kernels and overlaps of a training code; the default is Meshbook's
compute.py         matmuls, attention and elementwise operations of a layer, and the head
communication.py   collectives of the mesh axes
pipeline.py        order, idle time and timeline of the pipeline schedules
step_time.py       time of an optimizer step
candidates.py      every legal mesh and policy, and why others are left out
ranking.py         the candidates that fit, the fastest first; the estimates of one run
"""
