"""Slurm: submission from a login node. Imports no torch.

submit.py         SlurmScheduler: checks before submission, sbatch, states of jobs, what differs from other schedulers
script.py         rendering of the batch script's template; the config as options of sbatch and srun
"""
