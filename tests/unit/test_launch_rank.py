"""What ranks that the user started do together when the run is refused."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from components.config.errors import EXIT_INVALID, ConfigError
from components.config.schema import FinetuneConfig
from components.launch.rank import Recipe, run_here
from components.launch.run_directory import RunDirectory, attempt_logs

RANKS, ROUNDS = 4, 25


def refuse(cfg: FinetuneConfig) -> None:
    raise ConfigError("parallelism.tp: no plan")


def be_rank(rank: int, folder: Path, together: Any) -> None:
    os.environ["RANK"] = str(rank + 1)  # rank 0 alone would hold a lease
    sys.stderr = (folder / f"stderr_{rank}").open("w", buffering=1)
    recipe = Recipe("finetune", refuse, FinetuneConfig, Path(__file__))
    for number in range(ROUNDS):
        run = folder / f"run_{number}"
        directory = RunDirectory(run, fresh=True, created=[run], lock=None, attempt=0)
        together.wait(20)
        assert run_here(recipe, None, directory) == EXIT_INVALID  # type: ignore[arg-type]


def test_ranks_that_are_all_refused_say_it_once_and_leave_nothing(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        attempt_logs(tmp_path / f"run_{number}", 0).mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(RANKS)
    ranks = [context.Process(target=be_rank, args=(rank, tmp_path, together)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    printed = "".join((tmp_path / f"stderr_{rank}").read_text() for rank in range(RANKS))
    assert printed.count("parallelism.tp: no plan\n") == ROUNDS
    assert not list(tmp_path.glob("run_*"))
