"""Multi-process test harness: runs a function on every rank of a forked gloo world.

    def check(rank: int, scale: float) -> float:
        value = torch.tensor([scale * rank], dtype=torch.float64)
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(2, check, 3.0) == [3.0, 3.0]

Ranks are forked because a forked child has torch imported already: a world of two ranks starts in 0.1 s, where
`torchrun` needs 4 s. The function need not be picklable (closures work), but its results must be. A process that
has initialized CUDA must not fork, so tests that use this harness must not initialize CUDA in the parent.

`run_ranks` raises `RankFailure` as soon as a rank fails. `start_ranks` waits for every rank and returns the outcome
of each, for tests of failures. Neither leaves a process behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The first backward of a process starts autograd's threads, after which forks cannot run one. Without a GPU there are
# none, unless the compiler of a CUDA build ran before.
torch.zeros((), requires_grad=True).backward()

PROCESS_GROUP_TIMEOUT = timedelta(seconds=40)
GRACE_SECONDS = 2.0  # time for the peers of a failed rank to report their own errors
_PR_SET_PDEATHSIG = 1
_STALE_PREFIXES = ("SLURM_", "TORCHELASTIC_", "MESHBOOK_", "GROUP_", "ROLE_", "PMI_", "OMPI_")

RankEnvironment = Callable[[int], dict[str, str | None]]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a result, an exception, a signal or an exit code, or killed by the harness."""

    rank: int
    result: Any = None
    exception: str | None = None  # "ValueError: message"
    traceback: str | None = None
    signal: str | None = None  # name of the signal that killed it, such as "SIGABRT"
    exit_code: int | None = None  # set if it called os._exit without returning a result
    stack: str | None = None  # its stack if the harness had to kill it

    @property
    def ok(self) -> bool:
        """Return whether the function returned on this rank."""
        return not (self.exception or self.signal or self.stack is not None) and self.exit_code is None

    def __str__(self) -> str:
        if self.ok:
            return f"rank {self.rank}: returned"
        if self.exception:
            return f"rank {self.rank}: raised {self.exception}\n{self.traceback}"
        if self.stack is not None:
            return f"rank {self.rank}: still running, killed by the harness. Stack:\n{self.stack}"
        if self.signal:
            return f"rank {self.rank}: killed by {self.signal}\n{self.traceback or ''}"
        return f"rank {self.rank}: exited with code {self.exit_code} and no result"


class RankFailure(AssertionError):
    """At least one rank did not return. `outcomes` holds all ranks; the message lists the failed ones."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if not outcome.ok]
        ranks = ", ".join(str(outcome.rank) for outcome in failed)
        report = "\n".join(str(outcome) for outcome in failed)
        super().__init__(f"rank(s) {ranks} of {len(outcomes)} failed\n{report}")
        self.outcomes = outcomes


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 240.0,
    env: RankEnvironment | None = None,
    init: bool = True,
) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` gloo ranks and return the results in rank order.

    Args:
        timeout: limit for all ranks together, in seconds.
        env: returns extra environment variables for a rank (the value None unsets one). They override the single-node
            RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        init: False leaves `init_process_group` to the function: either through MASTER_PORT, which is reserved
            for it, or with `join_world`.

    Raises:
        RankFailure: a rank raised, was killed or timed out. Its peers are killed after a short grace period.
    """
    outcomes = _World(world_size, function, args, env, init).outcomes(timeout, grace=GRACE_SECONDS)
    if not all(outcome.ok for outcome in outcomes):
        raise RankFailure(outcomes)
    return [outcome.result for outcome in outcomes]


def start_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: RankEnvironment | None = None,
    init: bool = True,
) -> list[Outcome]:
    """Like `run_ranks`, but let every rank end by itself, and return all outcomes instead of raising."""
    return _World(world_size, function, args, env, init).outcomes(timeout, grace=timeout)


def join_world(timeout: timedelta = PROCESS_GROUP_TIMEOUT) -> None:
    """Initialize gloo through the rendezvous file of this world, as `init=True` does before the function is called."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['HARNESS_RENDEZVOUS_FILE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


@dataclass
class _World:
    size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    env: RankEnvironment | None
    init: bool
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    done: dict[int, Outcome] = field(default_factory=dict)

    def outcomes(self, timeout: float, grace: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        with tempfile.TemporaryDirectory(prefix="ranks-") as name, _held_port() as port:
            folder = Path(name)
            try:
                for rank in range(self.size):
                    self._fork(rank, folder, port)
                while len(self.done) < self.size and time.monotonic() < deadline:
                    self._collect(deadline, folder)
                    if not all(outcome.ok for outcome in self.done.values()):
                        deadline = min(deadline, time.monotonic() + grace)
                        grace = float("inf")  # later failures do not extend the grace period
                self._dump_stacks(folder)
            finally:
                self._kill()
                for rank in range(self.size):
                    sys.stderr.write(_read(folder / f"stderr_{rank}"))
        return [self.done[rank] for rank in range(self.size)]

    def _fork(self, rank: int, folder: Path, port: int) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._rank_main, args=(rank, sender, folder, port), daemon=False)
        process.start()
        sender.close()  # so that the pipe closes when the child exits; ranks forked later would inherit this end
        self.processes.append(process)
        self.pipes.append(receiver)

    def _collect(self, deadline: float, folder: Path) -> None:
        waiting = {rank: self.pipes[rank] for rank in range(self.size) if rank not in self.done}
        sentinels = {self.processes[rank].sentinel: rank for rank in waiting}
        ready = wait([*waiting.values(), *sentinels], timeout=max(0.0, deadline - time.monotonic()))
        for rank, pipe in waiting.items():
            if pipe in ready or self.processes[rank].sentinel in ready:
                self.done[rank] = self._outcome(rank, folder)

    def _outcome(self, rank: int, folder: Path) -> Outcome:
        pipe, process = self.pipes[rank], self.processes[rank]
        try:
            report = pipe.recv_bytes() if pipe.poll() else None
        except EOFError:
            report = None
        if report is not None:
            return Outcome(rank, **pickle.loads(report))
        process.join()
        if process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            return Outcome(
                rank, signal=name, traceback=f"{_read(folder / f'stack_{rank}')}{self._stderr(rank, folder)}"
            )
        return Outcome(rank, exit_code=process.exitcode)

    @staticmethod
    def _stderr(rank: int, folder: Path) -> str:
        """Return the end of what a rank and its children wrote to file descriptor 2."""
        return _read(folder / f"stderr_{rank}")[-2000:]

    def _dump_stacks(self, folder: Path) -> None:
        hung = [rank for rank in range(self.size) if rank not in self.done]
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if hung:
            time.sleep(0.3)
        for rank in hung:
            self.done[rank] = Outcome(rank, stack=_read(folder / f"stack_{rank}"))

    def _kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # the process group, which includes the children of the rank
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()

    def _rank_main(self, rank: int, sender: Connection, folder: Path, port: int) -> None:
        gc.freeze()  # collections would copy the pages of half a million inherited objects, in every rank
        os.setpgid(0, 0)
        _die_with_parent()
        atexit._clear()  # an exit function of the parent may wait for a thread that only the parent has
        with open(folder / f"stderr_{rank}", "ab") as errors:
            os.dup2(errors.fileno(), 2)  # the last words of a rank that C++ aborts belong into its outcome
        with open(folder / f"stack_{rank}", "w") as stack:
            faulthandler.enable(file=stack, all_threads=False)
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
            returned, report = self._report(rank, folder, port)
            sys.stdout.flush()
            sys.stderr.flush()
            sender.send_bytes(report)
            while returned:  # until the parent kills it: a peer may still be reading data from this rank
                signal.pause()
            os._exit(0)  # skips the interpreter's shutdown, which would run the parent's exit handlers

    def _report(self, rank: int, folder: Path, port: int) -> tuple[bool, bytes]:
        """Call the function; return whether it succeeded, and the pickled fields of the `Outcome`."""
        try:
            torch.set_num_threads(1)
            self._set_environment(rank, folder, port)
            if self.init:
                join_world()
                dist.barrier()  # so that a rank that fails immediately does not fail while others are still connecting
            return True, pickle.dumps({"result": self.function(rank, *self.args)})
        except BaseException as error:  # SystemExit and KeyboardInterrupt are reported too
            summary = "".join(traceback.format_exception_only(error)).strip()
            return False, pickle.dumps({"exception": summary, "traceback": traceback.format_exc()})

    def _set_environment(self, rank: int, folder: Path, port: int) -> None:
        for name in [name for name in os.environ if name.startswith(_STALE_PREFIXES)]:
            del os.environ[name]
        variables: dict[str, str | None] = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "HARNESS_RENDEZVOUS_FILE": str(folder / "rendezvous"),
        }
        variables |= self.env(rank) if self.env else {}
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _held_port() -> Any:
    """Reserve a TCP port: it is bound but never listened on, so that rank 0 can still bind it."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
