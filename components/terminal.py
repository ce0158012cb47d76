"""Escaping of control characters in text for terminals and logs."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn, TextIO

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional formatting
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # surrogates, which stand for bytes of a file name that are not UTF-8
    "]"
)


def printable(text: str) -> str:
    r"""Return text with its control characters written as `\x1b` or `\u202e`.

    Data, file names and messages are untrusted: raw, they could recolor, clear or overwrite the terminal.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def print_text(
    *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print like `print`, with control characters escaped."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


@contextmanager
def exit_on_broken_pipe() -> Iterator[None]:
    """Exit with the status of SIGPIPE if the reader of stdout has closed it: `--help | head`."""
    try:
        try:
            yield
        except SystemExit:  # --help
            _flush()
            raise
        _flush()
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        raise SystemExit(128 + signal.SIGPIPE) from error


def _flush() -> None:
    if sys.stdout is not None:  # None: the process was started with stdout closed
        sys.stdout.flush()


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a tool with the arguments of the command line, and exit with its status or that of `exit_on_broken_pipe`."""
    with exit_on_broken_pipe():
        status = main(sys.argv[1:])
    sys.exit(status)


def guard_output() -> None:
    """Escape the records of the project's loggers and the traceback of an uncaught exception in this process."""
    make = logging.getLogRecordFactory()

    def escaped(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("components"):
            record.msg, record.args = printable(record.getMessage()), None
        return record

    logging.setLogRecordFactory(escaped)
    if sys.excepthook is sys.__excepthook__:  # keep another hook, such as a debugger's
        sys.excepthook = _show_uncaught


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_text("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr, flush=True)
