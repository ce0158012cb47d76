"""Copy of the console in a rank's log: all that its process, child processes and C libraries write.

A second process copies, so that the last output of a process that crashes or is killed is kept. In place of a terminal
it opens a pseudoterminal, on which colors, progress bars and the width are those of the terminal.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from components.protocol.run_files import PRIVATE, open_append
from components.protocol.secrets import masked
from components.terminal import keep_running

_SETTLED = 1.0
"""Seconds without output after which no progress bar will draw over the last lines, also on a busy machine."""
_LAST_OUTPUT = 5.0
"""Maximum number of seconds that a process waits at its end for the copy of its output, as to a stopped terminal."""
_CONTROL = re.compile(rb"(\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|\r|\n)")
"""Escape sequences of terminals, carriage returns and newlines."""
_UNFINISHED = re.compile(rb"\x1b[^\x1b]{0,40}\Z")


def keep_console(log: Path) -> None:
    """Append all output of this process and its children to `log` from now on, and show it where it went before.

    Does nothing if stdout is not that of the process, as in a notebook, if no pseudoterminal can be opened, or if the
    process that copies cannot start, which then prints its error.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout.fileno() != 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    channels: dict[int, int] = {}  # end to read from: descriptor that its output is shown on
    writers: dict[int, int] = {}
    try:
        for number in (1, 2):
            if number == 2 and os.path.sameopenfile(1, 2):
                writers[2] = writers[1]
                break
            reader, writers[number] = _open_pair(number)
            channels[reader] = number
        control, others = socket.socketpair()
    except OSError:
        for end in {*channels, *writers.values()}:
            os.close(end)
        return
    root = str(Path(__file__).parents[2])
    arguments = [list(channels.items()), others.fileno(), str(log), root, sys.argv[1:]]
    copier = subprocess.Popen(
        [sys.executable, "-P", "-c", _COPIER, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        pass_fds=[*channels, others.fileno()],
        start_new_session=True,  # no signal to the group of this process
    )
    others.close()
    if not control.recv(1):  # it has ended
        for end in {*channels, *writers.values()}:
            os.close(end)
        return
    shown = {number: os.dup(number) for number in writers}
    for number, writer in writers.items():
        os.dup2(writer, number)
    for end in {*channels, *writers.values()}:
        os.close(end)
    atexit.register(_finish, os.getpid(), copier, shown, control)


_COPIER = """
import json, sys
channels, control, log, root, sys.argv[1:] = json.loads(sys.argv[1])
sys.path.append(root)  # not the folder of the recipe, whose files may be named like modules of Python
from components.protocol import console_log
console_log._copy(dict(channels), control, console_log.Path(log))
"""


def _finish(process: int, copier: subprocess.Popen[bytes], shown: dict[int, int], control: socket.socket) -> None:
    """Write to the console itself again, once all output so far is copied."""
    if os.getpid() != process:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    for number, saved in shown.items():
        os.dup2(saved, number)
    with suppress(OSError):
        control.settimeout(_LAST_OUTPUT)
        control.send(b"x")
        control.recv(1)
    copier.returncode = 0  # it ends with the last of this process's children, for which nobody waits


def _open_pair(number: int) -> tuple[int, int]:
    """Return two ends, to read from and to write to, of a pseudoterminal if the descriptor is a terminal, or a pipe."""
    if not os.isatty(number):
        return os.pipe()
    reader, writer = os.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # the terminal adds carriage returns
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    _copy_size(number, reader)
    return reader, writer


def _copy_size(terminal: int, other: int) -> None:
    """Give a pseudoterminal the size of the terminal; nothing if these are pipes."""
    with suppress(OSError):
        fcntl.ioctl(other, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))


def _copy(channels: dict[int, int], control: int, log: Path) -> None:
    """Copy the output of another process until it and its children have closed it, whatever ends them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    keep_running()
    os.write(control, b"x")
    lines = {reader: _Lines() for reader in channels}
    controls = [control]
    while lines:
        wait = _SETTLED if any(line.is_pending for line in lines.values()) else None
        ready = select.select([*lines, *controls], [], [], wait)[0]
        for reader in [each for each in ready if each in lines]:
            data = _read(reader)
            if data:
                _copy_size(channels[reader], reader)
                _show(sys.stdout if channels[reader] == 1 else sys.stderr, data)
                _append(log, lines[reader].add(data))
            else:
                _append(log, lines.pop(reader).rest())
        if set(ready) <= {control}:  # nothing was written for a while, or the process waits for its copy
            for line in lines.values():
                _append(log, line.rest() if ready else line.above())
        if ready == [control] and not os.read(control, 1):
            controls.clear()  # the process ended without waiting
        elif ready == [control]:
            with suppress(OSError):
                os.write(control, b"x")


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except OSError:  # Linux raises EIO once the other end of a pseudoterminal is closed
        return b""


def _show(stream: TextIO, data: bytes) -> None:
    while data:  # an unbuffered stream may write a part
        data = data[stream.buffer.write(data) or 0 :]
    stream.buffer.flush()


def _append(log: Path, text: bytes) -> None:
    """Append masked text. The log is not kept open: a rejected start removes it."""
    if text:
        shown = masked(text.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        with suppress(OSError), open_append(log, PRIVATE) as file:  # the disk may be full
            file.write(shown)


class _Lines:
    """Lines of an output as a terminal shows them in the end: without colors, and bars replaced by their last state."""

    def __init__(self) -> None:
        self._lines = [b""]
        """Lines that may still be drawn over."""
        self._row = 0
        """The line of the cursor."""
        self._at_start = False
        """Whether the next text replaces this line."""
        self._unfinished = b""

    @property
    def is_pending(self) -> bool:
        """Whether there are complete lines that were not returned."""
        return self._row > 0

    def add(self, data: bytes) -> bytes:
        """Add output; return the lines above all that it has drawn on."""
        data = self._unfinished + data
        end = _UNFINISHED.search(data)
        self._unfinished = end[0] if end and not _CONTROL.match(end[0]) else b""
        data = data[: len(data) - len(self._unfinished)]
        first = self._row
        for index, part in enumerate(_CONTROL.split(data)):
            if part == b"\n":
                self._row, self._at_start = self._row + 1, False
                if self._row == len(self._lines):
                    self._lines.append(b"")
            elif part == b"\r":
                self._at_start = True
            elif index % 2:
                self._control(part[2:-1], part[-1:])
            elif part:
                self._lines[self._row] = part if self._at_start else self._lines[self._row] + part
                self._at_start = False
            first = min(first, self._row)
        return self._take(first)

    def above(self) -> bytes:
        """Return the lines above the cursor that were not returned."""
        return self._take(self._row)

    def rest(self) -> bytes:
        """Return all lines that were not returned, also an incomplete one, without empty ones at the end."""
        count = len(self._lines)
        while count and not self._lines[count - 1]:
            count -= 1
        return self._take(count)

    def _control(self, argument: bytes, kind: bytes) -> None:
        if kind == b"A":
            self._row = max(0, self._row - int(argument or 1))
        elif kind == b"K" and (argument == b"2" or self._at_start):
            self._lines[self._row] = b""

    def _take(self, count: int) -> bytes:
        taken, self._lines = self._lines[:count], self._lines[count:] or [b""]
        self._row = max(0, self._row - count)
        return b"".join(line + b"\n" for line in taken)
