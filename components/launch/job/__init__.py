"""The job of a run on any scheduler: submission, attempts, and whether it starts again. Imports no torch.

scheduler.py  Scheduler: the submission that all schedulers share, and what each of them states; the copy of the code
attempts.py   the beginning and the end of an attempt
policy.py     the table of limits on new starts
__main__.py   `python -m components.launch.job begin|check|conclude RUN_DIR`, the commands of a batch script

The life of a run, from a signal to the next attempt:

    signal     USR2 or SIGTERM, from the scheduler or the user       -> protocol/processes: a rank records it
    flag       the training loop handles it                          -> watch/watchdog: StopRequest
    reduction  the flags of all ranks are summed with the step       -> training/step: train_step
    save       all ranks leave the loop at the same step, and save   -> training/run: Run.finish
    status     result.json: preempted; exit status 0; RUN/requeue    -> launch/rank: run_worker
    conclude   the batch script calls `conclude`                     -> launch/job/attempts: conclude
    policy     may the job start again? else the limit is printed    -> launch/job/policy: reason_to_end
    start      the script requeues the job, which calls `begin`      -> launch/job/attempts: begin

On Kubernetes the pod (launch/k8s/pod) asks the same policy at the end, and exits with 86 to be replaced; the new pods
call the same `begin`.
"""
