"""Rich console for untrusted text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
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
