"""Weights and matmuls with few bits.

nf4.py         4-bit weights of QLoRA, and matmuls with them; nf4_kernel.py: their unpacking on a GPU
float8.py      linear layers that compute in float8
qat.py         quantization-aware training: linear layers that round weights and activations as after quantization
"""
