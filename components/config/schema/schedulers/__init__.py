"""Parts of `cluster` that belong to one scheduler.

slurm.py       job on Slurm
kubernetes.py  job on Kubernetes
"""
