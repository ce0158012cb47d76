"""Text for terminals and logs: control characters are escaped, secrets masked, and lines fitted to the terminal."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from argparse import HelpFormatter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from components.protocol.secrets import masked

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional formatting
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # surrogates, which stand for bytes of a file name that are not UTF-8
    "]"
)


def printable(text: str) -> str:
    """Return text without secrets and control characters."""
    return escaped(masked(text))


def escaped(text: str) -> str:
    r"""Return text with its control characters written as `\x1b` or `\u202e`.

    Data, file names and messages are untrusted: raw, they could recolor, clear or overwrite the terminal.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def print_text(
    *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print like `print`, with control characters escaped and secrets masked."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


_COMMAND = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S* )*(?:python|torchrun|meshbook|make|eval|echo|sbatch|srun) ")
_WORD = re.compile(r"""(?:--[\w-]+ (?=[^\s-]))?(?:[^\s'"]|'[^']*'|"[^"]*"|['"])+""")
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|B|m?s|x)\b)|(?<=\dx) (?=\d)")
_FIRST_COLUMNS = re.compile(r"(?:\S+(?: \S+){0,3} {2,}(?!->))+(?=\S)")


class HelpText(HelpFormatter):
    """Formatter of --help that keeps the lines of a description, unless the terminal is narrower."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fit(textwrap.indent(text, indent), width)


def terminal_width() -> int:
    """Return the columns of the terminal; 80 if the output is no terminal."""
    return max(40, shutil.get_terminal_size().columns)


def fit(text: str, width: int | None = None) -> str:
    """Wrap what is wider than the terminal: texts by words, also in a second column; commands as a shell continues
    them, with their comments in lines of their own; tables in Markdown, which a file gets, as columns."""
    width = width or terminal_width()
    blocks: list[tuple[int, list[str]]] = []
    for line in text.split("\n"):
        body = line.lstrip()
        start = len(line) - len(body)
        column = _FIRST_COLUMNS.match(body)
        hang = start + (len(column[0]) if column else 2 if body.startswith("- ") else 0)
        continues = blocks and start == blocks[-1][0] and body and not column and not body.startswith("- ")
        continues = continues and body.startswith("|") == blocks[-1][1][0].lstrip().startswith("|")
        if continues and blocks[-1][1][0] and not _COMMAND.match(line) and not _COMMAND.match(blocks[-1][1][0]):
            blocks[-1][1].append(line)
        else:
            blocks.append((hang, [line]))
    return "\n".join(each for hang, lines in blocks for each in _fit_block(lines, hang, width))


def _fit_block(lines: list[str], hang: int, width: int) -> list[str]:
    """Return lines of one paragraph, entry or command in lines that fit."""
    if all(len(line) <= width for line in lines):
        return lines
    first = lines[0]
    if first.startswith("| ") and len(lines) > 1:
        return _fit_markdown(lines, width) if sys.stdout.isatty() else lines
    if _COMMAND.match(first):
        code, _, comment = first.partition(" # ")
        margin = " " * (len(first) - len(first.lstrip()) + 4)
        notes = _wrap(f"# {comment.strip()}", width, initial_indent=margin, subsequent_indent=f"{margin}# ")
        return [*fit_command(code.rstrip(), width), *(notes if comment else ())]
    if hang > width // 2:
        hang = len(first) - len(first.lstrip()) + 4
    text = " ".join([first, *(line.strip() for line in lines[1:])])
    return _wrap(text, width, subsequent_indent=" " * hang)


def _wrap(text: str, width: int, initial_indent: str = "", subsequent_indent: str = "") -> list[str]:
    """Return lines of whole words, with a number and its unit on the same line."""
    glued = _UNIT.sub("\N{NO-BREAK SPACE}", text)
    wrapper = textwrap.TextWrapper(
        width, initial_indent, subsequent_indent, break_long_words=False, break_on_hyphens=False
    )
    return [each.replace("\N{NO-BREAK SPACE}", " ") for each in wrapper.wrap(glued)]


def _fit_markdown(lines: list[str], width: int) -> list[str]:
    header, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in [lines[0], *lines[2:]])
    texts = {number for number in range(len(header)) if any(row[number][:1].isalpha() for row in rows)}
    return [line for row in fit_table(header, rows, texts, width) for line in row]


def fit_command(command: str, width: int | None = None) -> list[str]:
    """Return a shell command in lines that fit, as far as its words do; all but the last end in a backslash."""
    width = width or terminal_width()
    margin = command[: len(command) - len(command.lstrip())]
    lines = [margin]
    for word in _WORD.findall(command) if len(command) > width else [command.lstrip()]:
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) + 2 > width:
            lines += [f"{margin}    {word}"]
        else:
            lines[-1] += f" {word}" if lines[-1].strip() else word
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def fit_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[int], width: int | None = None
) -> list[list[str]]:
    """Return the lines of a table's header and of each row.

    Where the terminal is too narrow, headers and the columns `texts` are wrapped by words; numbers are not.
    """
    width = width or terminal_width()
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    room = width - 2 * (len(widths) - 1)
    if sum(widths) > room:
        least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
        for number, column in enumerate(columns):
            if number not in texts:
                widths[number] = max(*map(len, column[1:]), *map(len, header[number].split()))
        # The widest text loses one character at a time, so that all texts end nearly equally wide.
        while sum(widths) > room and (wide := [text for text in texts if widths[text] > least[text]]):
            widths[max(wide, key=lambda each: widths[each])] -= 1
        while sum(widths) < room:  # to the highest header
            heights = [len(_wrap(cell, size)) for cell, size in zip(header, widths, strict=True)]
            if max(heights) == 1:
                break
            widths[heights.index(max(heights))] += 1
    return [_fit_row(row, widths, texts, number == 0) for number, row in enumerate([header, *rows])]


def _fit_row(row: Sequence[str], widths: Sequence[int], texts: Collection[int], is_header: bool) -> list[str]:
    cells = [_wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
    height, lines = max(map(len, cells)), []
    for number in range(height):
        parts = []
        for index, (cell, size) in enumerate(zip(cells, widths, strict=True)):
            at = number - (height - len(cell)) * is_header  # a header stands on the rows below it
            part = cell[at] if 0 <= at < len(cell) else ""
            parts.append(part.ljust(size) if index in texts else part.rjust(size))
        lines.append("  ".join(parts).rstrip())
    return lines


class _Output(io.FileIO):
    """Standard stream that ends a tool if it cannot be written, with the status of SIGPIPE if its reader is gone.

    A run goes on without what cannot be written: its terminal is closed, or the disk of its log is full.
    """

    ends_process: bool | None = True
    """None: what is written is lost in silence."""

    def write(self, data: ReadableBuffer) -> int | None:  # type: ignore[override]
        """Write, or end the process or go on if that fails."""
        try:
            return super().write(data)
        except OSError as error:
            ends, self.ends_process = self.ends_process, None
            if ends is None:  # reported already
                return memoryview(data).nbytes
            if error.errno != errno.EPIPE or not ends:
                continues = "" if ends else "; the run continues and logs to metrics.jsonl"
                with suppress(OSError):
                    os.write(2, f"the output cannot be written: {error.strerror}{continues}\n".encode())
            if ends:
                raise SystemExit(1 if error.errno != errno.EPIPE else 128 + signal.SIGPIPE) from error
            return memoryview(data).nbytes


def open_output() -> None:
    r"""Escape characters that stdout and stderr cannot encode, as `\xe9`; end this process if stdout cannot be written.

    Closed standard streams (`>&-`) become /dev/null: the next file or socket would get their descriptors.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = _open(sys.stdout or os.fdopen(1, "w", closefd=False), True)
    sys.stderr = _open(sys.stderr or os.fdopen(2, "w", closefd=False), None)


def keep_running(encoding: str | None = None) -> None:
    """Go on from now on if stdout cannot be written, and encode stdout and stderr in this way; None: as before."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        raw = stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer
        if isinstance(raw, _Output):
            raw.ends_process = False if raw.ends_process else raw.ends_process
            if encoding is not None:
                stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _open(stream: TextIO, ends_process: bool | None) -> TextIO:
    """Return a stream on the descriptor of `stream`; `stream` itself if it is another one, as in a test or notebook."""
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() not in (1, 2):
        return stream
    stream.flush()
    raw = _Output(stream.fileno(), "w", closefd=False)
    raw.ends_process = ends_process
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextmanager
def exit_on_broken_pipe() -> Iterator[None]:
    """Flush stdout at the end, also at that of --help: `--help | head` exits with the status of SIGPIPE."""
    try:
        yield
    except SystemExit:  # --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a tool with the arguments of the command line, and exit with its status or that of `exit_on_broken_pipe`."""
    open_output()
    guard_output(sys.stderr)  # not stdout, which may hold the answers of a model
    try:
        with exit_on_broken_pipe():
            status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)


def guard_output(*streams: TextIO | None) -> None:
    """Mask secrets in all that this process writes to `streams`, also in what libraries, argparse and warnings write.

    Escape control characters in records of the project's loggers and in the traceback of an uncaught exception.
    """
    for stream in streams:
        _mask_output(stream)
    make = logging.getLogRecordFactory()

    def filtered(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("components"):
            record.msg, record.args = printable(record.getMessage()), None
        return record

    logging.setLogRecordFactory(filtered)
    if sys.excepthook is sys.__excepthook__:  # keep another hook, such as a debugger's
        sys.excepthook = _show_uncaught


def _mask_output(stream: Any) -> None:
    """Mask secrets in the text written to a stream, also by holders of the stream such as handlers of logs."""
    if stream is not None:  # None: it is closed
        write = stream.write
        stream.write = lambda text: write(masked(text))


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_text("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr, flush=True)
