"""Estimated memory of a run on its device, reported or refused before the run is started."""

from __future__ import annotations

from components.config.errors import ConfigError
from components.config.schema.cluster import Device, MemoryPolicy
from components.config.schema.recipes import RecipeConfig, TrainConfig


def memory_report(cfg: RecipeConfig, processes: int, *, on_cluster: bool) -> tuple[list[str], list[str]]:
    """Return the problems and the notes about the memory of a run's fullest rank.

    Args:
        cfg: A valid config.
        processes: Number of ranks.
        on_cluster: Whether the run waits in a queue; only then a missing device is noted.
    """
    cluster = cfg.cluster
    if cluster.memory_check is MemoryPolicy.off or not isinstance(cfg, TrainConfig):
        return [], []
    if cluster.gpu is None:
        unknown = "memory: not checked, since cluster.gpu is not set; set it to an option of conf/gpu"
        return [], [unknown] if on_cluster and cluster.device is not Device.cpu else []
    # Imported here, because every launch reaches this function and few have a device.
    from components.planning.formulas.hardware import find_hardware
    from components.planning.formulas.memory_check import Verdict, check_memory

    try:
        hardware = find_hardware(cluster.gpu)
    except ConfigError as error:
        return error.problems, []
    try:
        check = check_memory(cfg, cfg.parallelism.resolve(processes), hardware)
    except ConfigError as error:
        return [], [f"memory: not checked: {each}" for each in error.problems]
    if check.verdict is Verdict.exceeds and cluster.memory_check is MemoryPolicy.refuse:
        return [f"{check.text}; or set cluster.memory_check=report"], []
    return [], [check.text if check.verdict is not Verdict.exceeds else f"warning: {check.text}"]
