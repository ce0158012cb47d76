"""Kubernetes: submission with kubectl, and the program that each pod runs. Imports no torch.

submit.py   KubernetesScheduler: checks before submission, creation, and what differs from other schedulers
kubectl.py  rendering of the manifest's template; kubectl as a child process; ids and states of jobs
pod.py      the program of each pod: agrees with the others on an attempt, and starts and monitors its ranks
"""
