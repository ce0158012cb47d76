"""Measurements of the code itself, for scripts/check_sizes.py and on their own."""
