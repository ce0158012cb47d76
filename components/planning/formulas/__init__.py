"""Closed formulas of the memory and time of an optimizer step. Imports no torch.

term.py          a figure with its formula and source
architecture.py  weights and FLOPs of a model, from its sizes and its family
workload.py      what one rank computes in a step: model, mesh, batch, policies
hardware.py      speed of a GPU, its node and its network, read from conf/gpu
implementation.py  choices of a training program that a workload does not state
compute.py       matmuls, attention, memory-bound operations and the LM head
communication.py process groups on their links, collectives of the mesh axes, overlap
pipeline.py      pipeline schedules
step_time.py     time of an optimizer step, by term
"""
