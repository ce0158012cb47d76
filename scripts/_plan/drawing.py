"""Picture of a row of scripts/plan.py."""

from __future__ import annotations

from pathlib import Path

from components.planning.formulas.ranking import Plan
from components.planning.mesh_picture import picture_of_plan, render_mesh
from components.protocol.errors import ConfigError
from components.protocol.run_files import atomic_write, is_replaceable
from scripts._plan.options import PlanRequest
from scripts._plan.report import mesh_name

_MARK = """font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" role="img\""""
"""Attributes of the svg element in mesh.svg.j2, by which a picture is recognized."""


def write_drawing(request: PlanRequest, plans: list[Plan]) -> None:
    """Draw row 1, or the row of --why, in the file of --draw. Raises ConfigError if it cannot be written."""
    plan = plans[min(request.options.why or 1, len(plans)) - 1]
    model = request.cfg.model
    name = Path(model.path).name if model.path else str(model.config.get("model_type", "model"))
    picture = picture_of_plan(plan, request.hardware, request.choice.ranks_per_node, f"{name}: {mesh_name(plan)}")
    file = Path(request.options.draw)
    try:
        if file.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if not is_replaceable(file, _MARK):
            raise ConfigError(f"--draw {file}: exists and is no picture of a mesh; move it away, or name another file")
        atomic_write(file, render_mesh(picture))
    except OSError as error:
        raise ConfigError(
            f"--draw {file}: cannot be written: {error.strerror}; name a file in an existing folder"
        ) from error
