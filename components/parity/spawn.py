"""The processes of a comparison: one for the reference, then N that train on one mesh after the other.

A mesh on which a rank fails is reported as failed; the remaining meshes run in new processes.
"""

from __future__ import annotations

import json
import os
import socket
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

from components.config.errors import ConfigError
from components.parity.comparison import Bounds, Comparison, MeshResult, mesh_rank, reference_rank
from components.parity.shapes import MeshPlan
from components.protocol.failures import LOST_PEER
from components.protocol.role import without_ranks

AT_ONCE = 40
"""Meshes that share processes: each leaves its process groups and their sockets open."""
GRACE = 3.0
"""Seconds in which the peers of a failed rank may report their own errors."""


def compare(comparison: Comparison, plans: list[MeshPlan], log: Callable[[str], None]) -> Iterator[MeshResult | Bounds]:
    """Yield the bounds, then each mesh's result as soon as it is known. Raises ConfigError if the reference does."""
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        folder = Path(temporary)
        log("one process in plain PyTorch ...")
        for _, outcome in _world(1, reference_rank, (comparison, folder), 1):
            if isinstance(outcome, ConfigError):
                raise outcome
            if isinstance(outcome, str):
                raise RuntimeError(f"the reference failed: {outcome}")
        yield Bounds(**json.loads((folder / "bounds.json").read_text()))
        yield from (MeshResult(each.name, refused=list(each.problems)) for each in plans if each.problems)
        waiting = [each for each in plans if each.is_legal]
        while waiting:
            some = waiting[:AT_ONCE]
            done = 0
            for name, outcome in _world(comparison.processes, mesh_rank, (comparison, some, folder), len(some)):
                failed = not isinstance(outcome, MeshResult)
                result = MeshResult(some[done].name, failed=str(outcome)) if failed else outcome
                done += 1
                yield replace(result, mesh=name or result.mesh)
            waiting = waiting[max(done, 1) :]


def _world(processes: int, target: Callable[..., None], args: tuple[Any, ...], count: int) -> Iterator[tuple[str, Any]]:
    """Start ranks and yield `count` messages of rank 0; end early with the error of a rank that failed."""
    context = get_context("spawn")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    threads = str(max((os.cpu_count() or 1) // processes, 1))
    pipes, ranks = [], []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}
        variables |= {name: str(number) for name, number in numbers.items()}
        process = context.Process(target=_enter, args=(target, sender, variables, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        ranks.append(process)
    try:
        for _ in range(count):
            message = _next(pipes)
            yield message
            if not isinstance(message[1], MeshResult | None):
                return
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _next(pipes: list[Any]) -> tuple[str, Any]:
    """Return the next message of rank 0, or a rank's failure: a root cause rather than the loss of a peer, if any."""
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
            deadline = deadline or time.monotonic() + GRACE
    own = [each for each in failures if not any(sign in str(each) for sign in (*LOST_PEER, "a process died"))]
    return "", (own or failures)[0]


def _enter(target: Callable[..., None], sender: Connection, variables: dict[str, str], args: tuple[Any, ...]) -> None:
    kept = without_ranks(os.environ)
    os.environ.clear()
    os.environ |= kept | variables
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
        time.sleep(3600)  # until the parent kills it: a peer may still read what this rank sent
