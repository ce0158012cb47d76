"""Measurements that anyone can repeat, with the packages that people would use instead beside them."""
