"""Rules that involve several sections or the mesh. A rule about one section is in its dataclass.

Each rule is a function that takes the sections and sizes it needs and returns its problems: sentences with the value,
the rule and the key to change. `components/config/validate.py` applies the rules to the sections of a config.

compute_rules.py  attention, loss, float8, torch.compile, activation checkpointing
data_rules.py     held-out split, weights of sources, preference pairs and what they require of the model
mesh_rules.py     divisibility of heads, features, layers, experts and rows (of batches: ../micro_batches.py)
run_rules.py      best checkpoints, profiler traces, adapters of an evaluation
"""
