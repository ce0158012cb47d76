"""Ends a run that stands still, and says which rank it waits for.

A rank that is stopped, or that never comes to a collective, would keep all the others waiting until the collective
times out, and then they could say only that it did. Here every rank has two threads beside its main thread. One
posts where the rank is and reads what others posted (components.resilience.heartbeat); the other looks at the clock
alone, because the store of the ranks lives in rank 0 and hangs with it. Both run while the main thread waits in a
collective or for the device, and neither ever asks the device for anything.

Progress is a step, a forward of the model (training, evaluation and generation alike), and, between the steps, what
is read and written: a save goes on as long as bytes do. The run stands still when no rank has made any for `timeout`
seconds, twice as long around the first steps, which compile. Before the loop anything may take its time, but a rank
that does not even beat is missed.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.distributed.pipeline.schedule import Pipeline
from components.distributed.process.groups import is_distributed
from components.distributed.process.store_sync import PeerFailure
from components.housekeeping import bytes_moved
from components.protocol.exit_codes import EXIT_HUNG
from components.protocol.failures import HungRun
from components.resilience.flight_recorder import write_collectives
from components.resilience.frames import caller_code, package_of, thread_frames
from components.resilience.heartbeat import Heartbeat, Listener, blame, silent_store

SLOW_STEPS = 2
"""Steps that get twice the time. Not one: the host may be a step ahead of the device, and of the ranks it waits for."""
SHORTEST_BEAT, LONGEST_BEAT = 0.1, 5.0
"""Seconds between two beats; else a twentieth of the timeout."""
BEATS_MISSED, SHORTEST_SILENCE = 3, 2.0
"""A rank is silent when it misses so many beats, and at least so many seconds."""
READINGS = 4
"""How often the posts are read before the loop, in the time of the timeout."""
PARTING = 1.0
"""Seconds that a rank waits at the end for the others to write down where they are."""
LAST_WORDS = 10.0
"""Seconds for that end itself, which may hang in a file system: then it ends without words."""
MOVED_BYTES = 2**20
"""Reading or writing so much between two beats is progress, or any at all that reaches a disk."""
STOOD = "no progress for"
"""How every message begins."""
DEBUGGERS = {"bdb", "pdb", "pydevd", "debugpy", "_pydevd_bundle"}
"""Modules in which a main thread waits for a person."""


class StepTimeout(HungRun):
    """The run stood still for `step_timeout_seconds`."""


class Watchdog:
    """Watches over this rank from its construction on; a context around the loop, in which it is strict.

    Args:
        timeout: Seconds without progress after which the run is ended; 0: never, and nothing is watched.
        report: Keeps the failure and the stacks of all threads; called in a thread, before the process ends with
            status EXIT_HUNG.
        section: The section of the config whose `step_timeout_seconds` this is: what a message tells to change.
        home: Code of the recipe's main: what it has called is what the rank is doing; None: the caller's.
    """

    def __init__(
        self,
        timeout: float,
        report: Callable[[BaseException], object],
        section: str = "training",
        home: CodeType | None = None,
    ) -> None:
        self._timeout, self._section = timeout, section
        self._report = report
        self._beat = min(max(timeout / 20, SHORTEST_BEAT), LONGEST_BEAT)
        self._silence = max(BEATS_MISSED * self._beat, SHORTEST_SILENCE)
        self._home = home or caller_code()
        self._main = threading.get_ident()
        self._marks, self._marked = 0, time.monotonic()
        self._place, self._in_step, self._in_loop, self._steps = "before the loop", False, False, 0
        self._bytes = (0, 0)
        self._clock = _Clock(self._silence)
        self._moves = -1
        self._moved = self._answered = time.monotonic()
        self._listener, self._next_reading = Listener(), 0.0
        self._end, self._ending = threading.Event(), threading.Lock()
        self._alone = not is_distributed() or dist.get_world_size() == 1
        self._heart: Heartbeat | None = None
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)
        if timeout > 0:
            self._start(self._look)
            if not self._alone:
                self._heart = Heartbeat.join(self._place)
                self._start(self._talk, self._heart)

    def __enter__(self) -> Watchdog:
        self.mark()
        self._place, self._in_loop = f"in the {self._section} loop", True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, watch: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=watch, args=arguments, name=f"watchdog{watch.__name__}"))
        self._threads[-1].daemon = True
        self._threads[-1].start()

    def close(self) -> None:
        """Watch no more."""
        self._end.set()
        for thread in self._threads:
            thread.join(PARTING)
        if self._threads:
            faulthandler.cancel_dump_traceback_later()
        self._threads = []
        atexit.unregister(self.close)

    def mark(self, *_: object) -> None:
        """Note that this rank goes on; costs next to nothing, and may be called as often as one likes."""
        self._marks += 1
        self._marked = time.monotonic()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Within the context this rank is in optimizer step `number`."""
        self.mark()
        self._place, self._in_step = f"in step {number}", True
        yield
        self.mark()
        self._place, self._in_step = f"after step {number}", False
        self._steps += 1

    def follow(self, replica: nn.Module | Pipeline) -> None:
        """Take each forward of `replica` for progress from now on."""
        inner = replica.module if isinstance(replica, DistributedDataParallel) else replica  # evaluation calls no other
        if isinstance(inner, Pipeline) and self._heart is not None:
            self._heart.uncounted = inner.group.group_name
        for module in inner.stage_modules if isinstance(inner, Pipeline) else [inner]:
            module.register_forward_pre_hook(self.mark)

    @property
    def _limit(self) -> float:
        return self._timeout * (2 if self._steps < SLOW_STEPS else 1)

    def _quiet(self) -> float:
        """Seconds since this rank knows of progress of any rank."""
        return time.monotonic() - max(self._marked, self._moved)

    def _look(self) -> None:
        """Judge by this process alone: it is the only one, or the store of the ranks does not answer."""
        alone, unattended = self._alone, self._alone and not os.isatty(0)
        while not self._end.wait(self._beat / 2) and not self._ending.locked():
            self._tick()
            self._count_bytes()
            if self._in_loop:  # should something keep the GIL, not even this thread finds time to run
                faulthandler.dump_traceback_later(2 * self._limit, exit=unattended)
                if alone and _in_debugger(thread_frames(self._main)):
                    self.mark()
            unanswered = 0.0 if alone else time.monotonic() - self._answered
            if self._in_loop and self._quiet() > self._limit and (alone or unanswered > self._silence):
                self._fire(f"it is at {self._line()}" if alone else silent_store(), self._quiet())
            elif not self._in_loop and unanswered > self._timeout:
                self._fire(silent_store(), unanswered)

    def _talk(self, heart: Heartbeat) -> None:
        """Beat, and judge by what the other ranks post."""
        seen = 0
        with contextlib.suppress(dist.DistError, PeerFailure):  # the store is gone with rank 0: _look will tell
            while not self._end.wait(self._beat):
                self._tick()
                marks, early = self._marks, not self._in_loop  # who has not come to the loop keeps the others waiting
                self._note_moves(heart.beat(self._place, self._line(), moved=early or marks != seen))
                seen = marks
                self._suspect(heart)
            heart.beat(self._place, "", moved=True, left=True)

    def _note_moves(self, moves: int) -> None:
        self._answered = time.monotonic()
        if moves != self._moves:
            self._moves, self._moved = moves, self._answered

    def _suspect(self, heart: Heartbeat) -> None:
        """Listen to the other ranks, and judge by what is heard.

        In the loop only once nothing has moved for too long; before it now and then, for ranks that do not even beat.
        """
        loop = self._in_loop
        if loop and self._quiet() > self._limit / 2 and (verdict := heart.verdict()):
            self._fire(verdict, self._quiet(), heart)
        if loop and self._quiet() <= self._limit:
            self._listener = Listener()
            return
        if not loop and time.monotonic() < self._next_reading:
            return
        self._next_reading = time.monotonic() + self._timeout / READINGS
        posts = heart.posts()
        self._listener.hear(posts, heart.size)
        silent = self._listener.silent(self._silence if loop else self._timeout, posts)
        if self._listener.listened > self._silence if loop else silent:
            self._fire(blame(silent, posts), self._quiet() if loop else self._timeout, heart)

    def _tick(self) -> None:
        """Do not count time in which this process did not run: it was stopped, or suspended as a whole."""
        slept = self._clock.slept()
        if slept:
            self._marked, self._moved, self._answered = (
                min(since + slept, time.monotonic()) for since in (self._marked, self._moved, self._answered)
            )
            self._listener = Listener()

    def _count_bytes(self) -> None:
        before, self._bytes = self._bytes, bytes_moved()
        through_disk, through_calls = (now - then for now, then in zip(self._bytes, before, strict=True))
        if not self._in_step and (through_disk or through_calls > MOVED_BYTES):
            self.mark()

    def _fire(self, why: str, stood: float, heart: Heartbeat | None = None) -> None:
        """End this process after `stood` seconds: in the words of the rank that judged first, where ranks can agree."""
        if not self._ending.acquire(blocking=False):
            return
        faulthandler.dump_traceback_later(LAST_WORDS, exit=True)
        message = why if why.startswith(STOOD) else (
            f"{STOOD} {stood:.0f} s {self._place}: {why}; "
            "stacks and last collectives are in the logs of the ranks; "
            f"{self._section}.step_timeout_seconds={self._timeout:g} is the time that a step may take (0: any)"
        )  # fmt: skip
        with contextlib.suppress(dist.DistError, PeerFailure):
            message = heart.settle(message) if heart else message
        with contextlib.suppress(OSError):
            self._report(StepTimeout(message))
        write_collectives(PARTING)
        with contextlib.suppress(dist.DistError, PeerFailure):
            if heart is None:
                time.sleep(PARTING)
            else:
                heart.part(timedelta(seconds=PARTING))
        os._exit(EXIT_HUNG)

    def _line(self) -> str:
        """Where the main thread is: what the recipe has called, and the line in it."""
        stack = thread_frames(self._main)
        if not stack:
            return "its end"
        innermost = stack[0]
        line = f"{innermost.f_code.co_name} ({Path(innermost.f_code.co_filename).name}:{innermost.f_lineno})"
        called = next((inner for inner, outer in pairwise(stack) if outer.f_code is self._home), innermost)
        return line if called is innermost else f"{called.f_code.co_name}, {line}"


class _Clock:
    """Tells of time in which none of the threads that ask has run."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._asked = time.monotonic()

    def slept(self) -> float:
        """Return the seconds since any thread has asked, where they are too many for a process that runs; else 0."""
        with self._lock:
            gap, self._asked = time.monotonic() - self._asked, time.monotonic()
        return gap if gap > self._patience else 0.0


def _in_debugger(stack: list[FrameType]) -> bool:
    return any(package_of(frame) in DEBUGGERS for frame in stack)
