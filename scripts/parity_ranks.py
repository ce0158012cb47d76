"""The processes of `parity.py`: one for the reference, then N that go through the meshes one after the other.

A mesh on which a rank fails is told as failed; the others go on in new processes.
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
from components.protocol.failures import LOST_PEER
from components.protocol.role import without_ranks
from scripts.parity_run import Bounds, Comparison, Row, mesh_rank, reference_rank
from scripts.parity_shapes import MeshPlan

AT_ONCE = 40
"""Meshes in the same processes: each leaves its process groups, and their sockets, behind."""
GRACE = 3.0
"""Seconds for the peers of a failed rank to report what they saw."""


def compare(comparison: Comparison, plans: list[MeshPlan], say: Callable[[str], None]) -> Iterator[Row | Bounds]:
    """Yield the bounds, then a row per mesh as soon as there is one. Raises ConfigError where one process refuses."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        reference_folder = Path(folder)
        say("one process in plain PyTorch ...")
        for _, told in _world(1, reference_rank, (comparison, reference_folder), 1):
            if isinstance(told, ConfigError):
                raise told
            if isinstance(told, str):
                raise RuntimeError(f"the reference failed: {told}")
        yield Bounds(**json.loads((reference_folder / "bounds.json").read_text()))
        yield from (Row(each.name, refused=list(each.problems)) for each in plans if each.problems)
        waiting = [each for each in plans if each.is_legal]
        while waiting:
            some = waiting[:AT_ONCE]
            done = 0
            for name, told in _world(comparison.processes, mesh_rank, (comparison, some, reference_folder), len(some)):
                row = told if isinstance(told, Row) else Row(some[done].name, failed=str(told))
                done += 1
                yield replace(row, mesh=name or row.mesh)
            waiting = waiting[max(done, 1) :]


def _world(processes: int, target: Callable[..., None], args: tuple[Any, ...], count: int) -> Iterator[tuple[str, Any]]:
    """Start ranks and yield what rank 0 sends, `count` times; or, once, why a rank could not go on."""
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
            told = _next(pipes)
            yield told
            if not isinstance(told[1], Row | None):
                return
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _next(pipes: list[Connection]) -> tuple[str, Any]:
    """What rank 0 says next, or the first failure of any rank, one that is no consequence where there is one."""
    failures: list[Any] = []
    deadline: float | None = None
    open_pipes = list(pipes)
    while open_pipes and (deadline is None or time.monotonic() < deadline):
        for pipe in wait(open_pipes, timeout=0.5):
            try:
                name, told = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                open_pipes.remove(pipe)  # type: ignore[arg-type]
                name, told = "", "a process died"
            if isinstance(told, Row | None):
                return name, told
            failures.append(told)
            deadline = deadline or time.monotonic() + GRACE
    own = [each for each in failures if not any(sign in str(each) for sign in (*LOST_PEER, "a process died"))]
    return "", (own or failures)[0]


def _enter(target: Callable[..., None], sender: Connection, variables: dict[str, str], args: tuple[Any, ...]) -> None:
    kept = without_ranks(os.environ)
    os.environ.clear()
    os.environ |= kept | variables
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        target(lambda name, told: sender.send((name, told)), *args)
    except ConfigError as error:
        sender.send(("", error))
    except Exception as error:
        traceback.print_exc()
        sender.send(("", f"{type(error).__name__}: {error}".splitlines()[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(KeyboardInterrupt):
        time.sleep(3600)  # until the parent ends it: a peer may still be reading what this rank sent
