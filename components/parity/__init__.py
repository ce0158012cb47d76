"""The same training in one process of plain PyTorch and on a mesh, compared.

shapes.py      MeshPlan, plan_all: every mesh of N processes, and why some cannot be; imports no torch
reference.py   the curve of one process; shares nothing with the training step
comparison.py  a mesh's curve, gradients and replicas against the reference
spawn.py       compare: the processes that do so for many meshes

`python scripts/parity.py` runs it on a user's model and data, the tests on tiny models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.parity.comparison import Bounds, Comparison, MeshResult
    from components.parity.spawn import compare
else:
    __getattr__ = lazy.attach(__name__)
