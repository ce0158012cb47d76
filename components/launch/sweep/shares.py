"""Shares of this machine for points that run at the same time (sweep.parallel): GPUs and CPU threads."""

from __future__ import annotations

import os
from collections.abc import Mapping

from components.config.schema.cluster import Device
from components.config.schema.recipes import RecipeConfig
from components.launch.machine import RANKS_PER_CORE, usable_cores, visible_gpus
from components.launch.sweep.plan import Point

GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def share_problems(cfg: RecipeConfig, processes: int, parallel: int) -> list[str]:
    """Return the problems of running that many local points like this one at the same time.

    Args:
        cfg: Config of a point.
        processes: Its number of ranks, with its share of the GPUs.
        parallel: sweep.parallel.
    """
    gpus = visible_gpus(os.environ)
    if parallel == 1:
        return []
    if gpus and cfg.cluster.device != Device.cpu:
        share = gpus // parallel
        if gpus % parallel:
            divisors = ", ".join(str(number) for number in range(1, gpus + 1) if gpus % number == 0)
            return [
                f"sweep.parallel={parallel}: the points share {gpus} visible GPUs, which must be divisible by it; set "
                f"it to one of {divisors}, or change CUDA_VISIBLE_DEVICES"
            ]
        if share < processes <= gpus:  # more than all GPUs are rejected for any run
            return [
                f"sweep.parallel={parallel}: each point has {share} of the {gpus} visible GPUs, but it starts "
                f"{processes} processes, and each needs its own GPU; lower sweep.parallel or cluster.procs_per_node"
            ]
        return []
    limit, total = RANKS_PER_CORE * usable_cores(), parallel * processes
    if total <= limit or processes > limit or cfg.cluster.oversubscribe:
        return []
    return [
        f"sweep.parallel={parallel}: {parallel} points of {processes} processes are {total} on this machine; the limit "
        f"is {RANKS_PER_CORE} per core, {limit} on {usable_cores()} usable cores; lower it, or set "
        "cluster.oversubscribe=true"
    ]


def share_of(slot: int, parallel: int, point: Point, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit a point to its share; none for a point that runs as a job of its own.

    Args:
        slot: Number of the share, less than `parallel`.
        parallel: Number of shares.
        point: The point.
        environ: Variables of the sweep. OMP_NUM_THREADS is not changed if the user has set it.
    """
    if parallel == 1 or not point.runs_here:
        return {}
    variables = {}
    if THREADS not in environ:
        variables[THREADS] = str(max(usable_cores() // ((point.processes or 1) * parallel), 1))
    size = visible_gpus(environ) // parallel
    if size and visible_gpus(environ) % parallel == 0:
        names = environ.get(GPUS, ",".join(map(str, range(size * parallel)))).split(",")
        variables[GPUS] = ",".join(name.strip() for name in names[slot * size : (slot + 1) * size])
    return variables
