"""What a GPU would do with the code, shown without one: the recipes' own step on fake CUDA tensors.

`cuda_stub.cpp` lets a CPU build of torch accept fake CUDA tensors; `server.py` is a process that loads it before torch
and forks for each case; `device.py` holds the fake device and what is recorded on it; `cases.py` holds the cases.
"""
