"""Memory of a run before it is started: the estimate, reported or refused, and the step of cluster.dry_run=plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from components.config.errors import ConfigError
from components.config.schema.cluster import Device, MemoryPolicy
from components.config.schema.recipes import RecipeConfig, TrainConfig
from components.config.shape import read_shape


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
    from components.planning.formulas.hardware import device_files, find_hardware
    from components.planning.formulas.memory_check import Verdict, check_memory

    try:
        hardware = find_hardware(cluster.gpu)
    except ConfigError as error:
        return error.problems, []
    used, *others = device_files(cluster.gpu)
    notes = [f"{used}: used instead of {other}" for other in others]
    try:
        check = check_memory(cfg, cfg.parallelism.resolve(processes), hardware)
    except ConfigError as error:
        return [], notes + [f"memory: not checked: {each}" for each in error.problems]
    if check.verdict is Verdict.exceeds and cluster.memory_check is MemoryPolicy.refuse:
        return [f"{check.text}; or set cluster.memory_check=report"], []
    return [], [*notes, check.text if check.verdict is not Verdict.exceeds else f"warning: {check.text}"]


def played_memory(cfg: RecipeConfig, processes: int, recipe: Path) -> list[str]:
    """Return the memory and traffic of a recipe's step in lines of text, with cluster.dry_run=plan; otherwise none.

    Raises ConfigError if the recipe does not train or a dry run cannot play it.
    """
    cluster = cfg.cluster
    if cluster.dry_run != "plan":
        return []
    if not isinstance(cfg, TrainConfig):
        raise ConfigError("cluster.dry_run=plan: plays a training step, which this recipe does not have; set true")
    from components.planning.dry_run.played_run import dry_run_lines, play_run
    from components.planning.formulas.hardware import find_hardware
    from components.planning.formulas.memory import estimate_memory
    from components.planning.formulas.memory_check import workload_on

    estimated = None
    if cluster.gpu is not None:
        hardware = find_hardware(cluster.gpu)
        try:
            workload = workload_on(cfg, cfg.parallelism.resolve(processes), hardware)
        except ConfigError:  # the formulas do not cover the model, which a dry run builds
            pass
        else:
            cfg = replace(cfg, parallelism=workload.parallelism)  # with activation_checkpointing=auto resolved
            estimated = estimate_memory(workload, hardware.device_type).peak
    first, *others = dry_run_lines(play_run(cfg, read_shape(cfg.model), processes, recipe), estimated)
    return [f"step on fake tensors: {first}", *others]
