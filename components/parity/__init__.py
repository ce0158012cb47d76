"""Comparison of training on a mesh with the same training in one process of plain PyTorch.

shapes.py      MeshPlan, plan_all: every mesh of N processes, or why it is not possible; imports no torch
reference.py   the loss curve of one process; shares no code with the training step
comparison.py  compare: starts the processes that compare each mesh's curve, gradients and replicas with the reference

`python scripts/parity.py` runs it on a user's model and data; the tests run it on tiny models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.parity.comparison import Bounds, Comparison, MeshResult, compare
else:
    __getattr__, __dir__ = lazy.attach(__name__)
