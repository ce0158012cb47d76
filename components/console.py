"""Rich console and tables for untrusted text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.terminal import printable


class PlainConsole(Console):
    """Console that prints text literally: without markup and emoji codes, and with control characters escaped.

    This includes the cells of tables, since rich passes every string through `render_str`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Convert a string to rich text, with control characters escaped."""
        return super().render_str(printable(text), **settings)


def new_table(header: Sequence[str], text_columns: Collection[int], *, wrap: bool = False) -> Table:
    """Return a table without lines; columns of text, given by number, are aligned left, the others right.

    Args:
        wrap: Break long texts into lines instead of cutting them.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(header):
        is_text = number in text_columns
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=is_text and not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. The caller escapes control characters with `printable`."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def number_text(value: float | None, form: str) -> str:
    """Return a formatted number; empty for None."""
    return "" if value is None else format(value, form)
