"""Shapes and texts of an SVG file, as strings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

INK, MUTED, RULE, PAPER, FAINT = "#1d2730", "#566470", "#c9d1d8", "#ffffff", "#f3f5f7"
"""Colors of texts, secondary texts, lines, the page, and boxes without emphasis."""
_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MARK = f'font-family="{_FONT}" role="img"'
"""Attributes in the second line of every picture, by which it is known as one."""
CHARACTER, _BOLD = 0.57, 0.66
"""Average width of a character as a share of the font size, in the widest of usual fonts, DejaVu Sans."""
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class SvgCanvas:
    """Elements of an SVG picture, in drawing order. Lengths are pixels."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def rect(
        self,
        box: tuple[float, float, float, float],
        fill: str,
        *,
        stroke: str = "none",
        stroke_width: float = 1.0,
        radius: float = 0.0,
        dash: str = "",
        tooltip: str = "",
        **data: object,
    ) -> None:
        """Add a rectangle.

        Args:
            box: x, y, width and height.
            dash: Lengths of dashes and gaps of the outline; empty: solid.
            tooltip: Text that a viewer shows under the pointer.
            data: Attributes `data-NAME`, for programs that read the picture.
        """
        x, y, width, height = map(_number, box)
        attributes = {"x": x, "y": y, "width": width, "height": height, "fill": fill}
        if stroke != "none":
            attributes |= {"stroke": stroke, "stroke-width": _number(stroke_width)}
        if radius:
            attributes["rx"] = _number(radius)
        if dash:
            attributes["stroke-dasharray"] = dash
        attributes |= {f"data-{name.replace('_', '-')}": str(value) for name, value in data.items()}
        self._add("rect", attributes, f"<title>{_xml_text(tooltip)}</title>" if tooltip else "")

    def line(self, points: Iterable[tuple[float, float]], color: str, *, width: float = 1.0, dash: str = "") -> None:
        """Add a line through points."""
        attributes = {
            "points": " ".join(f"{_number(x)},{_number(y)}" for x, y in points),
            "fill": "none",
            "stroke": color,
            "stroke-width": _number(width),
        }
        if dash:
            attributes["stroke-dasharray"] = dash
        self._add("polyline", attributes)

    def text(
        self,
        x: float,
        y: float,
        content: str | Sequence[tuple[str, str]],
        *,
        size: float = 12.0,
        color: str = INK,
        bold: bool = False,
        anchor: str = "start",
    ) -> None:
        """Add a line of text whose baseline is at `y`.

        Args:
            content: The text, or pairs of a text and its color.
            anchor: start, middle or end: what `x` is.
        """
        attributes = {"x": _number(x), "y": _number(y), "font-size": _number(size), "fill": color}
        attributes["xml:space"] = "preserve"  # of a parent, Chromium ignores it
        if bold:
            attributes["font-weight"] = "bold"
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if isinstance(content, str):
            inner = _xml_text(content)
        else:
            inner = "".join(f'<tspan fill="{shade}">{_xml_text(part)}</tspan>' for part, shade in content)
        self._add("text", attributes, inner)

    def document(self, width: float, height: float, title: str) -> str:
        """Return the SVG file, on white paper."""
        size = f'width="{_number(width)}" height="{_number(height)}" viewBox="0 0 {_number(width)} {_number(height)}"'
        head = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {MARK}>',
            f"<title>{_xml_text(title)}</title>",
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        ]
        return "\n".join([*head, *self._elements, "</svg>", ""])

    def _add(self, name: str, attributes: dict[str, str], inner: str = "") -> None:
        listed = " ".join(f"{key}={quoteattr(_INVALID.sub('?', value))}" for key, value in attributes.items())
        self._elements.append(f"<{name} {listed}>{inner}</{name}>" if inner else f"<{name} {listed}/>")


def _xml_text(text: str) -> str:
    """Return text for XML: escaped, with `?` for characters that XML does not allow."""
    return escape(_INVALID.sub("?", text))


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the approximate width of a text."""
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return ((_BOLD if bold else CHARACTER) * (len(text) - wide) + wide) * size


def wrapped(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Return a text as lines of about `width`, broken at spaces, or within a longer word after its punctuation."""
    lines = [""]
    for word in re.findall(r"\S+\s*", text):
        whole = text_width(word.strip(), size, bold=bold) <= width
        for part in [word] if whole else re.findall(r"[^\s_/.,;:=-]{1,16}[\s_/.,;:=-]*|[\s_/.,;:=-]+", word):
            if lines[-1] and text_width(lines[-1] + part.strip(), size, bold=bold) > width:
                lines.append("")
            lines[-1] += part
    return [line.strip() for line in lines if line.strip()]


def tinted(color: str, share: float) -> str:
    """Return a color `#rrggbb` mixed with white.

    Args:
        share: Share of the color, from 0 (white) to 1.
    """
    parts = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
