"""Watchdog that ends a run without progress, and reports the rank that it waits for; requests to save and stop.

If a rank is stopped or never joins a collective, all others wait until the collective times out, and its error does not
name the rank. The watchdog runs two threads on every rank. One posts the rank's status and reads those of the others
(components.watch.heartbeat). The other only checks the clock, because the rendezvous store is served by rank 0 and
hangs with it. Both run while the main thread waits in a collective or for the device, and neither uses the device.

Progress is an optimizer step, a forward of the model (training, evaluation and generation alike) and, between steps,
bytes read or written, such as those of a save. A run hangs if no rank makes progress for `timeout` seconds, doubled
during the first steps, which compile. Before the loop there is no limit on progress, but a rank that posts no
heartbeats is reported as missing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.distributed.pipeline_schedule import Pipeline
from components.distributed.process.groups import is_distributed
from components.distributed.process.store_sync import PeerFailure
from components.protocol.errors import EXIT_HUNG
from components.protocol.failures import HungRun, package_of, thread_frames
from components.protocol.processes import (
    CTRL_C_MESSAGE,
    LAUNCHER_PID,
    STOP_SIGNALS,
    RecordedSignals,
    bytes_moved,
    current_rank,
    set_handler,
)
from components.protocol.run_files import atomic_write
from components.watch.heartbeat import BeatTracker, HangVerdict, Heartbeat, blame, silent_store

_SLOW_STEPS = 2
"""Steps that get twice the timeout. Not 1, because the host may be a step ahead of the device and of other ranks."""
_MIN_BEAT_SECONDS, _MAX_BEAT_SECONDS = 0.1, 5.0
"""Bounds of the seconds between two beats, a twentieth of the timeout."""
_MISSED_BEATS, _MIN_SILENCE_SECONDS = 3, 2.0
"""A rank is silent after this many missed beats, but not before this many seconds."""
_READS_PER_TIMEOUT = 4
"""How often the posts are read per timeout, before the loop."""
_EXIT_GRACE_SECONDS = 1.0
"""Seconds that a rank waits at the end for the others to write their reports."""
_EXIT_TIMEOUT_SECONDS = 10.0
"""Time limit in seconds for writing reports and stacks, which may hang in a file system; then the process exits."""
_PROGRESS_BYTES = 2**20
"""Bytes through system calls between two checks that count as progress; of bytes to or from a disk any number does."""
_MESSAGE_PREFIX = "no progress for"
"""Beginning of every message."""
_DEBUGGERS = {"bdb", "pdb", "pydevd", "debugpy", "_pydevd_bundle"}
"""Modules of debuggers, in which the main thread waits for the user."""
_DUMP_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""torch's environment variable with the path prefix of flight-recorder dumps, which the rank follows."""
_RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""Backend -> torch's private function that dumps its records; builds without NCCL lack the first."""


class StepTimeout(HungRun):
    """No progress of the run for `step_timeout_seconds`."""


class Watchdog:
    """Watchdog of this rank: active from construction, and as a context around the loop requires progress.

    Args:
        timeout: Seconds without progress after which the run is ended; 0 turns the watchdog off.
        report: Writes the failure and the stacks of all threads; called in a watchdog thread, before the process exits
            with status EXIT_HUNG.
        section: Config section with this `step_timeout_seconds`, for messages.
        recipe_code: Code of the recipe's main, whose current call is reported as the rank's activity.
    """

    def __init__(
        self,
        timeout: float,
        report: Callable[[BaseException], object],
        section: str,
        recipe_code: CodeType,
    ) -> None:
        self._timeout, self._section = timeout, section
        self._report = report
        self._beat_seconds = min(max(timeout / 20, _MIN_BEAT_SECONDS), _MAX_BEAT_SECONDS)
        self._silent_after = max(_MISSED_BEATS * self._beat_seconds, _MIN_SILENCE_SECONDS)
        self._recipe_code = recipe_code
        self._main = threading.get_ident()
        self._marks, self._last_mark = 0, time.monotonic()
        self._phase, self._in_step, self._in_loop, self._steps = "before the loop", False, False, 0
        self._bytes = (0, 0)
        self._suspension = _SuspensionDetector(self._silent_after)
        self._progress_count = -1
        self._last_progress = self._last_answer = time.monotonic()
        self._tracker, self._next_read = BeatTracker(), 0.0
        self._closed, self._firing = threading.Event(), threading.Lock()
        self._single = not is_distributed() or dist.get_world_size() == 1
        self._heartbeat: Heartbeat | None = None
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)
        if timeout > 0:
            self._start(self._watch_clock)
            if not self._single:
                self._heartbeat = Heartbeat.join(self._phase)
                self._start(self._watch_peers, self._heartbeat)

    def __enter__(self) -> Watchdog:
        self.mark()
        self._phase, self._in_loop = f"in the {self._section} loop", True
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
        """Stop the watchdog."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_EXIT_GRACE_SECONDS)
        if self._threads:
            faulthandler.cancel_dump_traceback_later()
        self._threads = []
        atexit.unregister(self.close)

    def mark(self, *_: object) -> None:
        """Record progress of this rank; negligible overhead, so it may be called often."""
        self._marks += 1
        self._last_mark = time.monotonic()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Report the body as optimizer step `number`."""
        self.mark()
        self._phase, self._in_step = f"in step {number}", True
        yield
        self.mark()
        self._phase, self._in_step = f"after step {number}", False
        self._steps += 1

    def follow(self, replica: nn.Module | Pipeline) -> None:
        """Count each forward of `replica` as progress from now on."""
        # Inside DDP, since evaluation and generation call the inner module.
        inner = replica.module if isinstance(replica, DistributedDataParallel) else replica
        if isinstance(inner, Pipeline) and self._heartbeat is not None:
            self._heartbeat.excluded_group = inner.group.group_name
        for module in inner.stage_modules if isinstance(inner, Pipeline) else [inner]:
            module.register_forward_pre_hook(self.mark)

    @property
    def _limit(self) -> float:
        return self._timeout * (2 if self._steps < _SLOW_STEPS else 1)

    def _seconds_idle(self) -> float:
        """Return the seconds since the last progress of any rank that this rank has recorded."""
        return time.monotonic() - max(self._last_mark, self._last_progress)

    def _watch_clock(self) -> None:
        """Detect a hang from this process alone: it is the only rank, or the store does not respond."""
        single, exit_when_stuck = self._single, self._single and not os.isatty(0)
        while not self._closed.wait(self._beat_seconds / 2) and not self._firing.locked():
            self._skip_suspended_time()
            self._mark_bytes()
            if self._in_loop:  # faulthandler's thread needs no GIL, which a stuck extension may hold forever
                faulthandler.dump_traceback_later(2 * self._limit, exit=exit_when_stuck)
                if single and any(package_of(frame) in _DEBUGGERS for frame in thread_frames(self._main)):
                    self.mark()
            unanswered = 0.0 if single else time.monotonic() - self._last_answer
            if self._in_loop and self._seconds_idle() > self._limit and (single or unanswered > self._silent_after):
                verdict = HangVerdict(f"it is at {self._location()}") if single else silent_store()
                self._end_run(verdict, self._seconds_idle())
            elif not self._in_loop and unanswered > self._timeout:
                self._end_run(silent_store(), unanswered)

    def _watch_peers(self, heartbeat: Heartbeat) -> None:
        """Post heartbeats, and detect a hang from the posts of the other ranks."""
        seen = 0
        with contextlib.suppress(dist.DistError, PeerFailure):  # the store ended with rank 0: _watch_clock reports it
            while not self._closed.wait(self._beat_seconds):
                self._skip_suspended_time()
                # A rank that has not reached the loop counts as progress, since the others may wait for it.
                marks, starting = self._marks, not self._in_loop
                self._record_progress(
                    heartbeat.beat(self._phase, self._location(), progressed=starting or marks != seen)
                )
                seen = marks
                self._check_peers(heartbeat)
            heartbeat.beat(self._phase, "", progressed=True, finished=True)

    def _record_progress(self, progress_count: int) -> None:
        self._last_answer = time.monotonic()
        if progress_count != self._progress_count:
            self._progress_count, self._last_progress = progress_count, self._last_answer

    def _check_peers(self, heartbeat: Heartbeat) -> None:
        """End the run if the posts of the other ranks show a hang.

        In the loop they are read only after the time limit without progress; before it a few times per timeout, to
        find ranks without heartbeats.
        """
        loop = self._in_loop
        if loop and self._seconds_idle() > self._limit / 2 and (verdict := heartbeat.verdict()):
            self._end_run(verdict, self._seconds_idle(), heartbeat)
        if loop and self._seconds_idle() <= self._limit:
            self._tracker = BeatTracker()
            return
        if not loop and time.monotonic() < self._next_read:
            return
        self._next_read = time.monotonic() + self._timeout / _READS_PER_TIMEOUT
        posts = heartbeat.posts()
        self._tracker.update(posts, heartbeat.size)
        silent = self._tracker.silent(self._silent_after if loop else self._timeout, posts)
        if self._tracker.seconds_tracked > self._silent_after if loop else silent:
            self._end_run(blame(silent, posts), self._seconds_idle() if loop else self._timeout, heartbeat)

    def _skip_suspended_time(self) -> None:
        """Exclude time in which this whole process did not run, such as a suspension of the machine."""
        slept = self._suspension.slept()
        if slept:
            self._last_mark, self._last_progress, self._last_answer = (
                min(since + slept, time.monotonic())
                for since in (self._last_mark, self._last_progress, self._last_answer)
            )
            self._tracker = BeatTracker()

    def _mark_bytes(self) -> None:
        before, self._bytes = self._bytes, bytes_moved()
        through_disk, through_calls = (now - then for now, then in zip(self._bytes, before, strict=True))
        if not self._in_step and (through_disk or through_calls > _PROGRESS_BYTES):
            self.mark()

    def _end_run(self, verdict: HangVerdict, seconds: float, heartbeat: Heartbeat | None = None) -> None:
        """End this process after `seconds` without progress, with the verdict of the first rank that found the hang."""
        if not self._firing.acquire(blocking=False):
            return
        faulthandler.dump_traceback_later(_EXIT_TIMEOUT_SECONDS, exit=True)
        if not verdict.message.startswith(_MESSAGE_PREFIX):
            message = (
                f"{_MESSAGE_PREFIX} {seconds:.0f} s {self._phase}: {verdict.message}; "
                "the stacks and last collectives are in the logs of the ranks; "
                f"{self._section}.step_timeout_seconds={self._timeout:g} is the limit (0: none)"
            )
            verdict = HangVerdict(message, verdict.hosts)
        with contextlib.suppress(dist.DistError, PeerFailure):
            verdict = heartbeat.publish_verdict(verdict) if heartbeat else verdict
        with contextlib.suppress(OSError):
            self._report(StepTimeout(verdict.message, verdict.hosts))
        _write_collectives(_EXIT_GRACE_SECONDS)
        with contextlib.suppress(dist.DistError, PeerFailure):
            if heartbeat is None:
                time.sleep(_EXIT_GRACE_SECONDS)
            else:
                heartbeat.await_others(timedelta(seconds=_EXIT_GRACE_SECONDS))
        os._exit(EXIT_HUNG)

    def _location(self) -> str:
        """Return the location of the main thread: the function that the recipe has called, and the innermost line."""
        stack = thread_frames(self._main)
        if not stack:
            return "the end of the process"
        innermost = stack[0]
        line = f"{innermost.f_code.co_name} ({Path(innermost.f_code.co_filename).name}:{innermost.f_lineno})"
        called = next((inner for inner, outer in pairwise(stack) if outer.f_code is self._recipe_code), innermost)
        return line if called is innermost else f"{called.f_code.co_name}, {line}"


class _SuspensionDetector:
    """Detection of time in which none of the calling threads has run."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._lock = threading.Lock()
        self._last_call = time.monotonic()

    def slept(self) -> float:
        """Return the seconds since the last call from any thread if they exceed the threshold, else 0."""
        with self._lock:
            gap, self._last_call = time.monotonic() - self._last_call, time.monotonic()
        return gap if gap > self._threshold else 0.0


def _write_collectives(timeout: float) -> Path | None:
    """Write the recorded collectives of this rank as JSON next to NCCL's own dumps, and return the file.

    Return None without a path prefix or a process group, or if it takes more than `timeout` seconds: the recorder
    queries the device for completed collectives, which blocks on a hung device. NCCL writes its own dump, for
    `torchfrtrace`, only when a collective times out, possibly long after the hang was detected.
    """
    prefix = os.environ.get(_DUMP_PREFIX)
    if not prefix or not dist.is_initialized():
        return None
    path = Path(f"{prefix}{dist.get_rank()}.json")
    written: list[Path] = []

    def write() -> None:
        records = {name: _dump(function) for name, function in _RECORDERS.items()}
        atomic_write(path, json.dumps({name: record for name, record in records.items() if record.get("entries")}))
        written.append(path)

    writer = threading.Thread(target=write, name="flight_recorder", daemon=True)
    writer.start()
    writer.join(timeout)
    return path if written else None


def _dump(function: str) -> dict[str, Any]:
    # torch has no public function for this.
    dump = getattr(torch._C._distributed_c10d, function, None)
    return json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}


class StopRequest:
    """Context that handles stop signals, and brings all ranks to the same decision to save and stop.

    SIGTERM, SIGUSR2 and SIGHUP request preemption, the first Ctrl-C an interruption; a second Ctrl-C aborts at once.
    The previous handlers are restored on exit. Training steps sum `flags` over all ranks at their end and pass the
    result to `update`; evaluation and generation call `agreed` before each batch or token.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Prepare the request; `device` is the device of the flags' all-reduce (None: the CPU)."""
        self._device = device or torch.device("cpu")
        self.flags = torch.zeros(3, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        """This rank's (preempt, interrupt, save) requests as 0 or 1; a signal sets its own at any moment."""
        self.status = "ok"
        """ok, or preempted or interrupted once all ranks have agreed; the same on every rank."""
        self._values = self.flags.numpy()  # a handler may run below a torch mode that would intercept tensor operations
        self._interrupted = False
        self._reduction: _FlagReduction | None = None
        self._listener = _SignalListener(self._request)
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signal_number in (*STOP_SIGNALS, signal.SIGINT):
            previous = self._previous[signal_number] = set_handler(signal_number, self._handle)
            for arrived in (
                previous.arrived if isinstance(previous, RecordedSignals) else ()
            ):  # signals before this context
                if arrived == signal_number:
                    self._handle(signal_number, None)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.stop()
        for signal_number, handler in self._previous.items():
            signal.signal(signal_number, handler)

    @property
    def stopped(self) -> bool:
        """Whether all ranks have agreed to stop; the same on every rank."""
        return self.status != "ok"

    def update(self, steps: Iterable[tuple[bool, bool]]) -> bool:
        """Record the (preempt, interrupt) requests of steps, reduced over all ranks; return whether the run stops."""
        for preempt, interrupt in steps:
            self._record(preempt, interrupt)
        return self.stopped

    def agreed(self, *, wait: bool = False) -> bool:
        """Return whether any rank has a request to stop, the same on every rank. A collective: call it on all ranks.

        On GPUs the result is one call late, so that the host does not wait for the device: each call starts an
        all-reduce, and reads the one started by the previous call.

        Args:
            wait: Wait for the device, for the result of this call.
        """
        if not self.stopped:
            started = _FlagReduction(self.flags, self._device)
            late, self._reduction = self._reduction, started if started.is_late and not wait else None
            if late is not None:
                self._record(*late.read())
            if self._reduction is None or self.stopped:  # if it stops, leave no collective unfinished
                self._record(*started.read())
        return self.stopped

    def _record(self, preempt: bool, interrupt: bool) -> None:
        if not self.stopped and (preempt or interrupt):
            self.status = "preempted" if preempt else "interrupted"

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self._request(signal_number)
        if signal_number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

    def _request(self, signal_number: int) -> None:
        if signal_number in (*STOP_SIGNALS, signal.SIGINT):
            self._values[int(signal_number == signal.SIGINT)] = 1


class _FlagReduction:
    """All-reduce of (preempt, interrupt), on a GPU asynchronous and followed by a copy to the host."""

    def __init__(self, flags: torch.Tensor, device: torch.device) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._host = vector = flags[:2].to(device if several else "cpu", non_blocking=True, copy=True)
        self.is_late = vector.is_cuda
        """Whether the result is to be read later, since the device has other work before it."""
        if several:
            dist.all_reduce(vector, async_op=True).wait()  # on a GPU the stream waits for the all-reduce, not the host
        if vector.is_cuda:
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[bool, bool]:
        """Wait for the result, and return whether any rank has a request to preempt, or to interrupt."""
        if self.is_late:
            self._event.synchronize()
        preempt, interrupt = self._host.tolist()
        return preempt > 0, interrupt > 0


class _SignalListener:
    """Thread that calls a function with the number of each signal, and acknowledges Ctrl-C on the terminal, at once.

    Python runs signal handlers only between two bytecodes of the main thread, so they run after the current backward,
    collective or wait for the device. A rank under Meshbook's launcher does not acknowledge, since the launcher does.
    """

    def __init__(self, request: Callable[[int], None]) -> None:
        self._request = request
        self._acknowledges = False
        self._pipe: tuple[int, int] | None = None
        self._previous = -1
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._acknowledges = LAUNCHER_PID not in os.environ and current_rank(os.environ) == 0
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and restore the previous wake-up descriptor."""
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._previous)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])
        self._pipe = None

    def _listen(self) -> None:
        reader = self._pipe[0] if self._pipe else -1
        while signal_number := os.read(reader, 1):
            self._request(signal_number[0])
            if signal_number[0] == signal.SIGINT and self._acknowledges:
                self._acknowledges = False
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, f"\n{CTRL_C_MESSAGE}\n".encode())
