"""Weights and matmuls with few bits.

nf4.py     4-bit weights of QLoRA, and matmuls with them
float8.py  linear layers that compute in float8, and quantization-aware training
"""
