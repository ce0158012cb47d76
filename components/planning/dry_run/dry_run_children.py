"""Dry runs in child processes, one per rank: for a launcher that imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from components.config.compose.frozen import to_yaml
from components.config.errors import ConfigError
from components.config.schema.recipes import TrainConfig
from components.planning.dry_run.dry_run_result import DryRun
from components.protocol.role import without_ranks

MODULE = "components.planning.dry_run"
TIMEOUT_SECONDS = 600.0
"""Time that one rank may take. 8B parameters take half a minute."""
RESULT, PROBLEMS = "result", "problems"
"""Keys of a child's answer, a line of JSON: the dry run, or the config errors."""


def ranks_to_play(cfg: TrainConfig, world: int) -> list[int]:
    """Return the ranks whose memory differs: the first and the last one, and one of each kind of pipeline stage.

    Ranks of one stage hold equal shards, except that the last ones hold less of what their number does not divide.
    The first stage holds most micro-batches in flight and the embedding, the last one the head and the loss.

    Raises ConfigError if the mesh does not fit `world` ranks.
    """
    pp = cfg.parallelism.resolve(world).pp
    stages = {0, pp // 2, pp - 1}
    return sorted({*(stage * (world // pp) for stage in stages), world - 1})


def start_dry_runs(
    cfg: TrainConfig,
    world: int,
    ranks: Collection[int],
    timeout: float = TIMEOUT_SECONDS,
    recipe: Path | None = None,
) -> list[DryRun]:
    """Play ranks of a run in child processes, as many at a time as there are cores; return the results in order.

    Args:
        world: Number of ranks of the run.
        timeout: Seconds that one rank may take.
        recipe: File of the recipe whose steps are played; None: Meshbook's recipe for the class of the config.

    Raises ConfigError with all problems, if a child refuses the config, fails or takes too long.
    """
    with ThreadPoolExecutor(min(len(ranks), os.cpu_count() or 1)) as pool:
        answers = list(pool.map(lambda rank: _play_in_child(cfg, world, rank, timeout, recipe), ranks))
    problems = [problem for answer in answers if isinstance(answer, ConfigError) for problem in answer.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return [answer for answer in answers if isinstance(answer, DryRun)]


def _play_in_child(
    cfg: TrainConfig, world: int, rank: int, timeout: float, recipe: Path | None
) -> DryRun | ConfigError:
    """Return the dry run of a rank, or the errors of its process."""
    request = {
        "recipe": None if recipe is None else str(recipe),
        "schema": type(cfg).__name__,
        "config": to_yaml(cfg),
        "world": world,
        "rank": rank,
    }
    environment = without_ranks(os.environ) | {"OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ConfigError(
            f"dry run of rank {rank} of {world}: was stopped after {timeout:g} seconds; play a smaller "
            "model or fewer layers, or allow more time"
        )
    answer = json.loads(child.stdout) if child.stdout else {}
    if RESULT in answer:
        return DryRun.from_json(answer[RESULT])
    last = child.stderr.strip().rpartition("\n")[2]
    plays = "" if recipe is None else f"; set cluster.dry_run=true, which plays no step of {recipe}"
    return ConfigError(
        answer.get(PROBLEMS)
        or f"dry run of rank {rank} of {world}: exited with status {child.returncode}: {last}{plays}"
    )
