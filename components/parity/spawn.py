"""Processes of a comparison: one for the reference, then N that train on one mesh after the other.

If a rank fails, its mesh is reported as failed, and the remaining meshes run in new processes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from components.parity.comparison import Bounds, Comparison, MeshResult, mesh_rank, reference_rank
from components.parity.shapes import MeshPlan
from components.protocol.errors import ConfigError
from components.protocol.failures import LOST_PEER
from components.protocol.role import without_ranks
from components.protocol.signals import reserve_loopback_port

_MESHES_PER_START = 40
"""Meshes that run in the same processes, limited because each leaves its process groups and their sockets open."""
_GRACE_SECONDS = 3.0
"""Time after a rank's failure in which other ranks may report theirs, one of which may be the root cause."""


def compare(comparison: Comparison, plans: list[MeshPlan], log: Callable[[str], None]) -> Iterator[MeshResult | Bounds]:
    """Yield the bounds, then the result of each mesh once it is complete.

    Raises:
        ConfigError: The reference raised it.
        RuntimeError: The reference failed otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        folder = Path(temporary)
        log("one process in plain PyTorch ...")
        for _, outcome in _run_ranks(1, reference_rank, (comparison, folder), 1):
            if isinstance(outcome, ConfigError):
                raise outcome
            if isinstance(outcome, str):
                raise RuntimeError(f"the reference failed: {outcome}")
        yield Bounds(**json.loads((folder / "bounds.json").read_text()))
        yield from (MeshResult(each.name, rejected=list(each.problems)) for each in plans if each.problems)
        pending = [each for each in plans if each.is_legal]
        while pending:
            started = pending[:_MESHES_PER_START]
            done = 0
            for name, outcome in _run_ranks(
                comparison.processes, mesh_rank, (comparison, started, folder), len(started)
            ):
                failed = not isinstance(outcome, MeshResult)
                result = MeshResult(started[done].name, failed=str(outcome)) if failed else outcome
                done += 1
                yield replace(result, mesh=name or result.mesh)
            pending = pending[max(done, 1) :]


def _run_ranks(
    processes: int, target: Callable[..., None], args: tuple[Any, ...], count: int
) -> Iterator[tuple[str, Any]]:
    """Start ranks and yield `count` messages (name, outcome) of rank 0; after a rank's failure, yield that and stop."""
    context = get_context("spawn")
    reserved = reserve_loopback_port()
    port = reserved.getsockname()[1]
    threads = str(max((os.cpu_count() or 1) // processes, 1))
    pipes, ranks = [], []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}
        variables |= {name: str(number) for name, number in numbers.items()}
        process = context.Process(target=_rank_main, args=(target, sender, variables, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        ranks.append(process)
    try:
        for _ in range(count):
            message = _next_message(pipes)
            yield message
            if not isinstance(message[1], MeshResult | None):
                return
    finally:
        for process in ranks:
            process.kill()
            process.join()
        reserved.close()


def _next_message(pipes: list[Any]) -> tuple[str, Any]:
    """Return the next message of rank 0, or a rank's failure: preferably a root cause, not a lost connection."""
    failures: list[Any] = []
    deadline: float | None = None
    open_pipes: list[Any] = list(pipes)
    while open_pipes and (deadline is None or time.monotonic() < deadline):
        ready: list[Any] = wait(open_pipes, timeout=0.5)
        for pipe in ready:
            try:
                name, outcome = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                name, outcome = "", "a process died"
            if isinstance(outcome, MeshResult | None):
                return name, outcome
            failures.append(outcome)
            deadline = deadline or time.monotonic() + _GRACE_SECONDS
    root_causes = [each for each in failures if not any(sign in str(each) for sign in (*LOST_PEER, "a process died"))]
    return "", (root_causes or failures)[0]


def _rank_main(
    target: Callable[..., None], sender: Connection, variables: dict[str, str], args: tuple[Any, ...]
) -> None:
    """Run `target` as one rank; send its messages and its failure to the parent, then wait to be killed."""
    inherited = without_ranks(os.environ)
    os.environ.clear()
    os.environ |= inherited | variables
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        target(lambda name, outcome: sender.send((name, outcome)), *args)
    except ConfigError as error:
        sender.send(("", error))
    except Exception as error:
        traceback.print_exc()
        sender.send(("", f"{type(error).__name__}: {error}".splitlines()[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(KeyboardInterrupt):
        time.sleep(3600)  # stay alive until the parent kills it: a peer may still receive data that this rank sent
