"""From a login node to a job, and what the job's batch script calls. Imports no torch.

submit.py      checks with Slurm, snapshot, script, sbatch; what a person is told
preflight.py   what can be told of a job before it is submitted, sbatch's own opinion too
options.py     the config as options of sbatch and srun
script.py      the template filled in
commands.py    sbatch, squeue and scontrol as processes, in a clean environment
jobs.py        states of jobs
snapshot.py    a copy of the code in the run directory
node_check.py  on every node before the ranks start
requeue.py     whether a job may be requeued: how often, and only while it makes progress
conclude.py    at the end of the batch script: result.json, the first failure, the exit status
"""
