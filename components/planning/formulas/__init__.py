"""Closed formulas of the memory and time of an optimizer step. Imports no torch.

architecture.py   weights and FLOPs of a model, from its sizes and its family
workload.py       what one rank computes in a step: model, mesh, batch, policies, and bytes saved for the backward
memory.py         peak memory of the fullest rank
memory_check.py   that memory against the device, before a run starts
hardware.py       a device, from a file of conf/gpu, and its time for a layer's operations and for the head
communication.py  collectives of the mesh axes
pipeline.py       order, idle time and timeline of the pipeline schedules
step_time.py      time of an optimizer step
ranking.py        every legal mesh and policy, those that fit with the fastest first, and why others are left out
"""
