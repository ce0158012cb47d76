"""The Slurm backend: from a login node to a job, and what the job's batch script calls. Imports no torch.

submit.py      SlurmBackend: checks, snapshot, script, sbatch, and the summary on the terminal
job_checks.py  what can be checked before a job is submitted, sbatch's own opinion included
options.py     the config as options of sbatch and srun
script.py      the rendered template
commands.py    sbatch, squeue and scontrol as processes, in a clean environment
jobs.py        the job of a run directory, states of jobs, scancel
snapshot.py    a copy of the code in the run directory
node_check.py  on every node before the ranks start
requeue.py     whether a job may be requeued: how often, and only while it makes progress
conclude.py    at the end of the batch script: result.json, the first failure, the exit status
"""
