"""The Slurm backend: job submission from a login node, and the programs that the batch script runs. Imports no torch.

submit.py      SlurmBackend: checks, snapshot, script, sbatch, and the printed summary
job_checks.py  checks before submission, including sbatch --test-only
options.py     the config as options of sbatch and srun
script.py      rendering of the batch script's template
commands.py    Slurm commands as child processes, in a clean environment
jobs.py        the job of a run directory, job states, scancel
snapshot.py    a copy of the code in the run directory
node_check.py  checks on every node before the ranks start
requeue.py     the requeue policy: limits on requeues, crashes, hangs, corruption and attempts without progress
attempt_start.py  the start of an attempt: limits on attempts, and the nodes to use
conclude.py    the end of an attempt: result.json, the first failure, whether to start the ranks again
"""
