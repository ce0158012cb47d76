"""Checks of GPU behavior without a GPU: the recipes' training step on fake CUDA tensors.

`cuda_stub.cpp` lets a CPU build of torch accept fake CUDA tensors; `server.py` is a process that loads it before torch
and forks for each case; `device.py` defines the fake device and records its operators; `cases.py` defines the cases.
"""
