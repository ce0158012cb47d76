"""Pictures of the console for README and docs: real commands in a pseudo-terminal, drawn as SVG.

    python -m scripts._docs.screens              # draw every picture of SCREENS (minutes)
    python -m scripts._docs.screens console      # draw one

Needs Linux and pyte, a terminal emulator (`pip install pyte`). The commands run in an empty folder that they see as
FOLDER, so that no temporary path is in the pictures. No test compares the pictures, since they contain measured times.
"""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import struct
import sys
import tempfile
import termios
import textwrap
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
LINES = 400
"""Height of the emulated terminal: more lines than a run prints."""
CHARACTER, LINE, MARGIN = 7.8, 17, 14
"""Width of a character, height of a line and margin, in pixels."""
BACKGROUND, FOREGROUND = "#1d2021", "#d5c4a1"
COLORS = {"red": "#fb4934", "green": "#b8bb26", "brown": "#fabd2f", "yellow": "#fabd2f", "blue": "#83a598",
          "magenta": "#d3869b", "cyan": "#8ec07c", "white": "#ebdbb2", "black": "#7c6f64"}  # fmt: skip
FOLDER = "/mnt"
"""Where the commands see their folder; on Linux it exists, and a mount namespace of its own hides what is there."""
SCREENS: dict[str, tuple[int, str]] = {
    "console": (
        80,
        "recipes/finetune.py model=tiny optimizer.lr=1e-2 training.max_steps=60 training.log_every=10 "
        "training.eval_every=30 training.seq_len=160 data.max_eval_samples=32 logging.examples=1 "
        "generation.samples=0 run.dir=first",
    ),
    "sweep": (
        110,
        "recipes/finetune.py -m parallelism=single,tp2,tp3 experiment=bench_mesh model=tiny "
        "training.max_steps=10 training.seq_len=128 run.dir=sweep",
    ),
}
"""Name -> columns, and the command below the interpreter. The model of 0.1M parameters takes seconds."""
PLOTS = {"console": ("first/loss.png", "loss.png")}
"""Name -> file that the command writes, and its name in docs/images."""


def main() -> None:
    """Draw the pictures named on the command line, or all."""
    for name in sys.argv[1:] or SCREENS:
        columns, command = SCREENS[name]
        with tempfile.TemporaryDirectory() as folder:
            lines = capture(columns, command, Path(folder))
            if name in PLOTS:
                source, plot = PLOTS[name]
                shutil.copyfile(Path(folder) / source, IMAGES / plot)
        (IMAGES / f"{name}.svg").write_text(draw(wrapped(f"$ python {command}", columns), lines, columns))
        print(IMAGES / f"{name}.svg")


def capture(columns: int, command: str, folder: Path) -> list[list[Any]]:
    """Run a command in a terminal of `columns` in `folder`; return its lines as characters with attributes."""
    import pyte

    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        script, *arguments = command.split()
        inside = f'mount --bind "$1" {FOLDER} && cd {FOLDER} && shift && exec "$@"'
        shell = ["unshare", "--map-root-user", "--mount", "sh", "-c", inside, "sh", str(folder)]
        os.execvp(shell[0], [*shell, sys.executable, str(ROOT / script), *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    try:
        while chunk := os.read(terminal, 1 << 16):
            stream.feed(chunk)
    except OSError:  # Linux raises EIO once the other end is closed
        pass
    os.waitpid(process, 0)
    lines = [[screen.buffer[row][column] for column in range(columns)] for row in range(screen.cursor.y + 1)]
    return [line for line in lines if any(each.data.strip() for each in line)]  # without empty lines


def wrapped(command: str, columns: int) -> list[str]:
    """Return a command as lines of at most `columns`, continued by backslashes as in a shell."""
    lines = textwrap.wrap(command, columns - 2, subsequent_indent="    ", break_on_hyphens=False)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def draw(prompt: list[str], lines: list[list[Any]], columns: int) -> str:
    """Return the SVG of a terminal window with the lines of a prompt and the output below them."""
    width, height = columns * CHARACTER + 2 * MARGIN, (len(lines) + len(prompt)) * LINE + 2 * MARGIN
    texts = [
        _text(number, f'<tspan fill="{COLORS["green"]}">{escape(line)}</tspan>') for number, line in enumerate(prompt)
    ]
    for number, line in enumerate(lines, len(prompt)):
        end = max(column for column, each in enumerate(line) if each.data.strip()) + 1
        texts.append(_text(number, "".join(_runs(line[:end]))))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n'
        f'<g font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="13" fill="{FOREGROUND}">\n'
        + "\n".join(texts)
        + "\n</g>\n</svg>\n"
    )


def _text(number: int, content: str) -> str:
    """Return a line; Chromium keeps its spaces only if it has the attribute itself."""
    return f'<text x="{MARGIN}" y="{MARGIN + (number + 0.75) * LINE:.0f}" xml:space="preserve">{content}</text>'


def _runs(line: list[Any]) -> list[str]:
    """Return the spans of a line: neighboring characters of one color and weight together."""
    spans: list[str] = []
    last: tuple[str, bool] | None = None
    text = ""
    for each in [*line, None]:
        style = None if each is None else (each.fg, each.bold)
        if style != last:
            if text.strip() or (text and style is not None):
                spans.append(_span(text, *last) if last else text)
            text, last = "", style
        text += each.data if each is not None else ""
    return spans


def _span(text: str, color: str, bold: bool) -> str:
    attributes = f' fill="{COLORS[color]}"' if color in COLORS else ""
    attributes += ' font-weight="bold"' if bold else ""
    return f"<tspan{attributes}>{escape(text)}</tspan>" if attributes else escape(text)


if __name__ == "__main__":
    main()
