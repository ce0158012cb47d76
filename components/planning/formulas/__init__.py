"""Closed formulas of the memory and time of an optimizer step. Imports no torch.

term.py          a figure with its formula and source
architecture.py  weights and FLOPs of a model, from its sizes and its family
workload.py      what one rank computes in a step: model, mesh, batch, policies
"""
