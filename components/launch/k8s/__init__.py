"""The Kubernetes backend: submission with kubectl, and the program that each pod runs. Imports no torch.

kubernetes_backend.py  KubernetesBackend: render, check, create, query, delete, and the printed summary
cluster_checks.py      checks before submission: of the config, and of the cluster with kubectl
pod_manifest.py        rendering of the manifest's template
pod_jobs.py            kubectl as a child process; ids and states of jobs, and the job of a run directory
pod.py                 the program of each pod: starts and monitors its ranks, and maps their end to an exit status
pod_attempts.py        agreement of the pods on an attempt, through files in the run directory, and its limits
"""
