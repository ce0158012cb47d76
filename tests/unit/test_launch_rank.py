"""Ranks started by the user (torchrun, srun) of a run whose config is rejected after launch."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from components.config.schema import FinetuneConfig, ModelConfig
from components.config.schema.data import DocsDataConfig
from components.launch.backend import Recipe
from components.launch.rank import run_here
from components.launch.run_directory import RunDirectory
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.run_files import attempt_logs

RANKS, ROUNDS = 4, 25
CONFIG = FinetuneConfig(model=ModelConfig(path="model"), data=DocsDataConfig())


def reject_config(cfg: FinetuneConfig) -> None:
    raise ConfigError("parallelism.tp: no plan")


def run_rank(rank: int, folder: Path, barrier: Any) -> None:
    os.environ["RANK"] = str(rank + 1)  # ranks start at 1, because rank 0 would take the lease
    sys.stderr = (folder / f"stderr_{rank}").open("w", buffering=1)
    recipe = Recipe("finetune", reject_config, FinetuneConfig, Path(__file__))
    for number in range(ROUNDS):
        run = folder / f"run_{number}"
        directory = RunDirectory(run, fresh=True, created=[run], lock=None, attempt=0)
        barrier.wait(20)
        assert run_here(recipe, CONFIG, directory) == EXIT_INVALID


def test_config_rejected_on_all_ranks_is_reported_once_and_leaves_no_directory(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        attempt_logs(tmp_path / f"run_{number}", 0).mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(RANKS)
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path, barrier)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    printed = "".join((tmp_path / f"stderr_{rank}").read_text() for rank in range(RANKS))
    assert printed.count("parallelism.tp: no plan\n") == ROUNDS
    assert not list(tmp_path.glob("run_*"))


def lose_a_peer(cfg: FinetuneConfig) -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4837")


@pytest.mark.parametrize("fresh", [True, False])
def test_ranks_that_lose_a_rejected_peer_exit_without_a_traceback(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one pipeline stage rejects the config; the stage that waits for its hidden states is not the cause."""
    run = tmp_path / "run"
    attempt_logs(run, 0).mkdir(parents=True)
    for rank, main in ((1, reject_config), (2, lose_a_peer)):
        monkeypatch.setenv("RANK", str(rank))
        directory = RunDirectory(run, fresh=fresh, created=[run], lock=None, attempt=0)
        recipe = Recipe("finetune", main, FinetuneConfig, Path(__file__))
        assert run_here(recipe, CONFIG, directory) == EXIT_INVALID
    assert run.exists() != fresh
    printed = capsys.readouterr().err
    assert "parallelism.tp: no plan" in printed
    assert "rank 2: another rank rejected the config" in printed


def test_lost_peer_without_a_rejected_config_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    attempt_logs(run, 0).mkdir(parents=True)
    monkeypatch.setenv("RANK", "2")
    recipe = Recipe("finetune", lose_a_peer, FinetuneConfig, Path(__file__))
    with pytest.raises(RuntimeError, match="Connection closed"):
        run_here(recipe, CONFIG, RunDirectory(run, fresh=True, created=[run], lock=None, attempt=0))
    assert "Connection closed" in (run / "result.json").read_text()


def run_out_of_memory(cfg: FinetuneConfig) -> None:
    raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes")


def test_other_failure_besides_a_rejected_config_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the run directory is gone: only a lost peer can be a consequence of a rejected config."""
    monkeypatch.setenv("RANK", "2")
    directory = RunDirectory(tmp_path / "run", fresh=True, created=[], lock=None, attempt=0)
    with pytest.raises(RuntimeError, match="allocate"):
        run_here(Recipe("finetune", run_out_of_memory, FinetuneConfig, Path(__file__)), CONFIG, directory)
