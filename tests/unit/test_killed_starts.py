"""A start that is killed before any change it makes to the run directory: the same command continues the run."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import pytest

from components.config.compose.frozen import read_frozen
from components.config.schema import CausalLMConfig, FinetuneConfig, WeightInit
from components.config.schema.data import DocsDataConfig
from components.launch.run_directory import RunDirectory
from components.launch.run_directory_lock import open_run_directory
from tests.suites import in_torture

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.symlink", "os.rmdir"}


def config(run_dir: Path) -> FinetuneConfig:
    cfg = FinetuneConfig(
        model=CausalLMConfig(init=WeightInit.random, config={"model_type": "llama"}, tokenizer="bytes"),
        data=DocsDataConfig(),
    )
    cfg.run.dir = str(run_dir)
    return cfg


def start(run_dir: Path) -> RunDirectory:
    cfg = config(run_dir)
    directory = open_run_directory(cfg, "finetune")
    directory.freeze(cfg, {"recipe": "finetune"})
    return directory


def killed_before(change: int, run_dir: Path, rejected: bool) -> bool:
    """Start a run in a child that is killed before its `change`-th change below `run_dir`; return whether it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the child only writes files
        child = os.fork()
    if child == 0:
        left = change

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in CHANGES and isinstance(arguments[0], str | os.PathLike) and str(run_dir) in str(arguments[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        status = 1
        try:
            directory = start(run_dir)
            if rejected:
                directory.discard("the ranks rejected it")
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


@pytest.mark.parametrize(
    ("earlier", "rejected"),
    [
        pytest.param(0, True, id="new run, discarded", marks=in_torture),
        pytest.param(1, False, id="continued run, started"),
        pytest.param(0, False, id="new run, started", marks=in_torture),
        pytest.param(1, True, id="continued run, discarded", marks=in_torture),
    ],
)
def test_start_killed_at_any_moment_is_continued_by_the_same_command(
    earlier: int, rejected: bool, tmp_path: Path
) -> None:
    change = 0
    while True:
        run_dir = tmp_path / f"run_{change}"
        for _ in range(earlier):
            lock = start(run_dir).lock
            assert lock is not None
            os.close(lock)
        if not killed_before(change, run_dir, rejected):
            break
        directory = start(run_dir)
        assert read_frozen(run_dir / "config.yaml", FinetuneConfig) == config(run_dir), change
        assert directory.attempt in (earlier, earlier + 1), change
        assert (run_dir / "logs" / "latest").resolve() == directory.logs, change
        change += 1
    assert change > 10
