"""The Slurm backend: job submission from a login node, and the programs that the batch script runs. Imports no torch.

submit.py         SlurmBackend: checks, snapshot, script, sbatch, and the printed summary
job_checks.py     checks before submission, including sbatch --test-only
script.py         rendering of the batch script's template; the config as options of sbatch and srun
jobs.py           Slurm commands as child processes; the job of a run directory, job states, scancel
snapshot.py       a copy of the code in the run directory
node_check.py     checks on every node before the ranks start
attempt_start.py  the start of an attempt: requeue policy, and the nodes to use
conclude.py       the end of an attempt: result.json, the first failure, whether to start the ranks again
"""
