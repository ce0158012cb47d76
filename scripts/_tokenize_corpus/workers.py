"""One process per input file, some at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from components.data.token_store.corpus import InputFile, Outcome, Progress
from components.launch.rank import die_with
from components.protocol.errors import ConfigError
from components.protocol.failures import describe_exit

Work = Callable[[InputFile, Callable[[Progress], object]], Outcome]
"""Function that processes a file and reports its progress."""
_SECONDS = 0.2  # between two events: the display is refreshed by this process, which has no thread when it forks


class Failed(NamedTuple):
    """Failure of one input file."""

    problems: list[str]
    is_config: bool
    """Whether the user can correct the file or the command; else the process or the disk failed."""


class Event(NamedTuple):
    """Message from the process of a file."""

    file: InputFile
    message: Progress | Outcome | Failed


def process_files(files: Sequence[InputFile], workers: int, threads: int, work: Work) -> Iterator[Event | None]:
    """Call `work` for each file in a process of its own, `workers` at a time, and yield what the processes report.

    Args:
        threads: Threads of the tokenizer in each process.

    Yields None when nothing was reported for a moment. A file that fails does not stop the others. If the iteration is
    abandoned or this process is killed, all processes are.
    """
    context = get_context("fork")  # the tokenizer is loaded once, before
    waiting = list(reversed(files))
    running: dict[Connection, tuple[InputFile, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(sender, os.getpid(), threads, work, waiting[-1]))
                process.start()
                sender.close()  # so that the end of the process is the end of the pipe
                running[receiver] = waiting.pop(), process
            ready = [each for each in wait(list(running), _SECONDS) if isinstance(each, Connection)]
            for receiver in ready:
                file, process = running[receiver]
                message = _receive(receiver, process, file)
                if not isinstance(message, Progress):
                    receiver.close()
                    process.join()
                    del running[receiver]
                yield Event(file, message)
            if not ready:
                yield None
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _receive(receiver: Connection, process: BaseProcess, file: InputFile) -> Progress | Outcome | Failed:
    try:
        message: Progress | Outcome | Failed = receiver.recv()
    except EOFError:
        process.join()
        return Failed([f"{file.path}: its process {describe_exit(process.exitcode or 0)}"], is_config=False)
    return message


def _run(sender: Connection, parent: int, threads: int, work: Work, file: InputFile) -> None:
    die_with(parent)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    if threads == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent kills this process
    try:
        sender.send(work(file, sender.send))
    except ConfigError as error:
        sender.send(Failed(error.problems, is_config=True))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sender.send(Failed([f"{file.path}: {where}{error.strerror or error}"], is_config=False))
