"""Ready configs: options of hub models with their sizes, and experiments whose mesh the planner chose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from components.config.compose.sources import CONF
from components.protocol.safe_parsing import load_yaml

PROCESSES = {"1gpu": 1, "1node": 8, "8node": 64}
"""Last part of the name of an experiment -> GPUs that it is for."""
EXPERIMENTS = {
    file.stem: PROCESSES[file.stem.rpartition("_")[2]]
    for file in sorted((CONF / "experiment").glob("*.yaml"))
    if file.stem.rpartition("_")[2] in PROCESSES
}
"""Experiments whose mesh the planner chose -> number of processes."""
_PUBLISHED = re.compile(r"([\d.]+)([MB]) parameters")


@dataclass(frozen=True)
class HubModel:
    """An option of conf/model for a model on the hub."""

    values: dict[str, Any]
    """Values of the file."""
    comment: str
    """Comment at its beginning, in one line."""

    @property
    def published(self) -> tuple[float, float] | None:
        """Number of parameters that the comment states, and half a unit of its last digit; None: not stated."""
        if (found := _PUBLISHED.search(self.comment)) is None:
            return None
        unit = {"M": 1e6, "B": 1e9}[found[2]]
        return float(found[1]) * unit, 0.5 * unit * 10 ** -len(found[1].partition(".")[2])


def _hub_models() -> dict[str, HubModel]:
    found = {}
    for file in sorted((CONF / "model").glob("*.yaml")):
        text = file.read_text()
        values = load_yaml(text)
        if values.get("path") and not str(values["path"]).startswith("package:"):
            lines = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
            found[file.stem] = HubModel(values, " ".join(lines))
    return found


HUB_MODELS = _hub_models()
