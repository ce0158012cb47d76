"""Start the ranks of a recipe like torchrun, without importing torch in every process.

A fork server imports torch and transformers once. Each rank is forked from it, receives torchrun's environment
variables, and executes the recipe file as `python recipes/finetune.py ARGUMENTS` does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from components.protocol.processes import reserve_loopback_port

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PRELOADED = [
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "hydra", "peft"),
]
AFTER_A_FAILURE = 20.0
"""Seconds that the other ranks have to exit once one has failed."""


def run_ranks(arguments: Sequence[str], size: int, folder: Path, seconds: float) -> tuple[int | None, str]:
    """Execute a recipe on `size` ranks in `folder`; return the exit status of the first that failed, and all output.

    Args:
        arguments: The recipe's file and its overrides.
        seconds: Timeout after which the remaining ranks are killed and the status is None.
    """
    os.environ.update(ENVIRONMENT)  # inherited by the fork server when it starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    reserved = reserve_loopback_port()
    port = reserved.getsockname()[1]
    logs = [folder / f"rank_{rank}.out" for rank in range(size)]
    ranks = [
        context.Process(target=_run_rank, args=(list(arguments), rank, size, port, folder, logs[rank]))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    status = _wait(ranks, time.monotonic() + seconds)
    reserved.close()
    return status, "\n".join(log.read_text(errors="replace") for log in logs if log.exists())


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> int | None:
    failed: int | None = 0
    while any(rank.exitcode is None for rank in ranks):
        if time.monotonic() > deadline:
            failed = failed or None
            for rank in ranks:
                rank.kill()
            break
        statuses = [rank.exitcode for rank in ranks if rank.exitcode]
        if statuses and not failed:
            failed, deadline = statuses[0], min(deadline, time.monotonic() + AFTER_A_FAILURE)
        time.sleep(0.02)
    for rank in ranks:
        rank.join()
    return failed or (None if failed is None else next((rank.exitcode for rank in ranks if rank.exitcode), 0))


def _run_rank(arguments: list[str], rank: int, size: int, port: int, folder: Path, log: Path) -> None:
    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.chdir(folder)
    os.environ.update(ENVIRONMENT)
    if size > 1:
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in local.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
