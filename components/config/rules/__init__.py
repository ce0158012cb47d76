"""Rules that several sections share, or that depend on the mesh; a rule about one section is in its dataclass.

Each rule is a function that takes the sections and numbers it needs and returns its problems: sentences with the value,
the rule and the key to change. `components/config/validate.py` applies them to the sections that a config has.

compute_rules.py  attention, loss, float8, compiled and recomputed layers
data_rules.py     weights of sources, held-out data
mesh_rules.py     what the mesh must divide: heads, features, layers, experts, rows (batches: ../micro_batches.py)
objective_rules.py  what an objective needs of the model and the adapters
run_rules.py      what a run does besides its steps: best checkpoints, traces, adapters of an evaluation
"""
