"""What the backends of all schedulers, Slurm and Kubernetes, share. Imports no torch.

job_attempts.py   attempts of a job, and the limits on attempts without progress
node_problems.py  checks of a node or pod before its ranks start
template.py       renders cluster.template, with limits on its time and memory
shared_paths.py   the paths that a config names, and whether other machines can access them
"""
