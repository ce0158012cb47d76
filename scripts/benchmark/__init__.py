"""Reproducible benchmarks, with alternative packages measured for comparison."""
