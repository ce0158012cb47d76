"""Benchmark tasks of lm-eval on any mesh, without an export.

harness.py        load_tasks, evaluate_tasks: tasks by name, their scores
mesh_lm.py        MeshLM: lm-eval's interface to a model; the only file that needs lm-eval at import
continuations.py  score_continuations: log-probabilities of requests, batched and divided over dp ranks
"""
