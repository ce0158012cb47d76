"""Rich's console for text that comes from elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from components.terminal import printable


class PlainConsole(Console):
    """A console on which text is only text: no markup, no emoji codes, and control characters are escaped.

    Also in the cells of tables, which rich passes through `render_str` as everything that is a string.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a string as rich prints it."""
        return super().render_str(printable(text), **settings)
