"""The parts that recipes are made of.

config         typed sections, composition, validation
protocol       what launcher and ranks agree on
launch         from a command line to ranks
distributed    processes, device mesh, parallelism
models         Hugging Face causal LMs on a mesh
data           from a source to micro-batches
observability  metrics, banner, result
resilience     watchdog, stop requests, fault injection
checkpoint     save, resume, retention
training       the optimizer step, and the mechanics around a recipe's loop
parity         a mesh compared with one process

`from components import data, distributed, training` opens a recipe as its table of contents and imports no torch: the
packages import a name when it is first used (lazy.py).
"""

import sys

from components.moved import MovedModules

# The one line of work at import: modules that were moved are reported by their new names.
sys.meta_path.append(MovedModules())
