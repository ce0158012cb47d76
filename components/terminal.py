"""Text on its way to a terminal or a log: control characters in it are escaped."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from types import TracebackType
from typing import TextIO

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional formatting
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # bytes of a file name that are no UTF-8
    "]"
)


def printable(text: str) -> str:
    r"""Return text with its control characters written as `\x1b` or `\u202e`.

    Data, file names and messages come from elsewhere; raw, they could recolor, clear or rewrite what a terminal shows.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def print_text(
    *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print as `print` does, with control characters escaped."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


def guard_output() -> None:
    """Escape what this process logs through the project's loggers, and the traceback of an uncaught exception."""
    make = logging.getLogRecordFactory()

    def escaped(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("components"):
            record.msg, record.args = printable(record.getMessage()), None
        return record

    logging.setLogRecordFactory(escaped)
    if sys.excepthook is sys.__excepthook__:  # a debugger may have its own
        sys.excepthook = _show_uncaught


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_text("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr, flush=True)
