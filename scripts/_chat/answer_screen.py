"""Input and output of a chat: on a terminal with a prompt, wrapped words and notes, else plain lines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from rich.cells import cell_len

from components.presentation import PlainConsole
from components.protocol.errors import ConfigError
from components.terminal import escaped, print_text

COMMANDS = "/reset   /system TEXT   /exit     Ctrl-C stops an answer, Ctrl-D exits"


class TerminalScreen:
    """A chat on a terminal."""

    def __init__(self) -> None:
        self._console = PlainConsole(highlight=False)
        self._wrap = WordWrap(self._console.width)
        with suppress(ImportError):  # some builds of Python lack it; input() then has no history
            import readline  # noqa: F401

    def loading(self) -> AbstractContextManager[object]:
        """Return a context in which a spinner shows that the model is being loaded."""
        return self._console.status("loading")

    def heading(self, title: str) -> None:
        """Print what the chat is with, and its commands."""
        self._console.print(title, style="bold")
        self._console.print(COMMANDS, style="dim")

    def messages(self) -> Iterator[str]:
        """Yield the lines that the user types, until Ctrl-D. Raises KeyboardInterrupt for Ctrl-C."""
        # The marks around the colors keep readline from counting them as columns.
        prompt = "\n\x01\x1b[1;36m\x02>\x01\x1b[0m\x02 " if self._console.color_system else "\n> "
        while True:
            try:
                yield input(prompt)
            except EOFError:
                print()
                return
            except UnicodeDecodeError:
                self.problem("the line is not valid UTF-8; type it again")
            except KeyboardInterrupt:
                print()
                raise

    def begin(self) -> None:
        """Begin an answer."""
        self._wrap = WordWrap(shutil.get_terminal_size().columns)

    def write(self, piece: str) -> None:
        """Write a piece of an answer."""
        print(self._wrap.add(escaped(piece)), end="", flush=True)

    def end(self, note: str = "") -> None:
        """End an answer. note: why it is not complete."""
        print(flush=True)
        if note:
            self.note(f"[{note}]")

    def note(self, text: str) -> None:
        """Print a note."""
        self._console.print(text, style="dim")

    def problem(self, text: str) -> None:
        """Print a problem, after which the chat goes on."""
        self._console.print(text, style="yellow")


class PlainScreen:
    """A chat without a terminal: a message per line of stdin, the answers on stdout, all else on stderr."""

    def loading(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is shown."""
        return nullcontext()

    def heading(self, title: str) -> None:
        """Print nothing: stdout holds only answers."""

    def messages(self) -> Iterator[str]:
        """Yield the lines of stdin. Raises ConfigError for one that is not UTF-8."""
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ConfigError(f"line {number} of stdin: is not valid UTF-8 ({error.reason}); convert it") from error

    def begin(self) -> None:
        """Begin an answer."""

    def write(self, piece: str) -> None:
        """Write a piece of an answer."""
        print(escaped(piece), end="", flush=True)

    def end(self, note: str = "") -> None:
        """End an answer. note: why it is not complete."""
        print_text(flush=True)
        if note:
            self.note(f"the answer is not complete: {note}")

    def note(self, text: str) -> None:
        """Print a note."""
        print_text(text, file=sys.stderr, flush=True)

    def problem(self, text: str) -> None:
        """Raise ConfigError: nobody is there to react."""
        raise ConfigError(text)


Screen = TerminalScreen | PlainScreen


def open_screen() -> Screen:
    """Return the screen for this process's stdin and stdout."""
    return TerminalScreen() if sys.stdin.isatty() and sys.stdout.isatty() else PlainScreen()


class WordWrap:
    """Wrapping of text that arrives in pieces: a word that reaches the edge is erased and moved to the next line."""

    def __init__(self, columns: int) -> None:
        self._columns = max(columns - 1, 1)
        """Columns that are used. The last one is not: a cursor beyond it cannot be moved back over the word."""
        self._column = 0
        self._word = ""

    def add(self, text: str) -> str:
        """Return the text to write, with control sequences that move words."""
        return "".join(map(self._add, text.expandtabs(4)))

    def _add(self, character: str) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        width, moved = cell_len(character), ""
        if self._column + width > self._columns:
            if character.isspace():
                return self._add("\n")
            begun = cell_len(self._word)
            if 0 < begun < self._column:
                moved = f"\x1b[{begun}D\x1b[K\n{self._word}"
                self._column = begun
            else:
                moved, self._column, self._word = "\n", 0, ""
        self._column += width
        self._word = "" if character.isspace() else self._word + character
        return moved + character
