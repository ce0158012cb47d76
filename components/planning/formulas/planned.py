"""Estimates of a run that result.json holds beside the measured figures."""

from __future__ import annotations

from dataclasses import dataclass

from components.config.errors import ConfigError
from components.config.schema.parallelism import MeshShape
from components.config.schema.recipes import TrainConfig
from components.planning.formulas.hardware import find_hardware
from components.planning.formulas.memory import estimate_memory
from components.planning.formulas.step_time import estimate_time
from components.planning.formulas.workload import build_workload


@dataclass(frozen=True, slots=True)
class Planned:
    """Estimates for one run on its device."""

    gpu: str
    """The device, cluster.gpu."""
    peak_memory_bytes: int
    """Peak memory of the fullest rank."""
    step_seconds: float
    """Time of an optimizer step."""


def plan_of(cfg: TrainConfig, mesh: MeshShape) -> Planned | None:
    """Return the estimates for a run; None if its device is not set or its model's sizes are unknown."""
    if cfg.cluster.gpu is None:
        return None
    try:
        hardware = find_hardware(cfg.cluster.gpu)
        workload = build_workload(cfg, mesh, on_gpu=hardware.is_gpu)
    except ConfigError:  # reported before the run started
        return None
    memory, time = estimate_memory(workload, hardware.device_type), estimate_time(workload, hardware)
    return Planned(hardware.name, memory.peak, round(time.seconds, 6))
