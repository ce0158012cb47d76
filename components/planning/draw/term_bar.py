"""A stacked bar of an estimate's terms, with names and values beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from components.planning.draw.svg import FAINT, INK, MUTED, RULE, SvgCanvas, text_width, wrapped
from components.planning.formulas.term import Term, bytes_text, three_digits, total

PALETTE = (
    "#1f6fb2",
    "#e08b27",
    "#2e8b57",
    "#b03a5b",
    "#7b5fb5",
    "#3aa6b9",
    "#c9a227",
    "#6b7f8f",
    "#d2691e",
    "#8a9a3b",
    "#5a6acf",
    "#a0785a",
)
HEIGHT, BAR = 300.0, 96.0
LABEL = 20.0
"""Smallest distance of two labels."""
MOST_TERMS = 10


@dataclass(frozen=True, slots=True)
class TermBar:
    """A stacked bar: the first term at the bottom."""

    title: str
    terms: tuple[Term, ...]
    unit: float
    """Value that is printed as 1."""
    unit_name: str
    limits: tuple[tuple[str, float], ...] = ()
    """Lines across the bar with their names, in the unit of the terms; the highest one is the top of the scale."""
    caption: str = ""

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.unit_name == "GiB":
            return bytes_text(value)
        return f"{three_digits(value / self.unit)} {self.unit_name}"

    @property
    def scale(self) -> float:
        """Value at the top of the bar."""
        return max([total(self.terms), *(value for _, value in self.limits), 1e-12])


def largest_terms(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return the largest terms first, and the sum of the others."""
    ordered = sorted((each for each in terms if each.value > 0), key=lambda each: -each.value)
    if len(ordered) <= MOST_TERMS:
        return tuple(ordered)
    rest = ordered[MOST_TERMS - 1 :]
    others = Term(f"{len(rest)} smaller terms", total(rest), ", ".join(each.name for each in rest))
    return (*ordered[: MOST_TERMS - 1], others)


def bar_width(bar: TermBar) -> float:
    """Return the approximate width of a bar with its labels."""
    number = f": 12,345 {bar.unit_name}"
    widths = [text_width(f"{each.name}{number} (12%)", 13) for each in bar.terms]
    widths += [text_width(f"{name}{number}", 13, bold=True) for name, _ in bar.limits]
    return BAR + 42 + max(widths, default=0.0)


def draw_bar(canvas: SvgCanvas, x: float, y: float, bar: TermBar) -> float:
    """Draw a bar with its labels; return the y below."""
    canvas.text(x, y + 16, bar.title, size=16, bold=True)
    for index, line in enumerate(wrapped(bar.caption, 560, 12.5)):
        y += 16 * bool(index)
        canvas.text(x, y + 36, line, size=12.5, color=MUTED)
    length = max(HEIGHT, LABEL * (len(bar.terms) + len(bar.limits)))
    top, bottom = y + 56, y + 56 + length
    pixels = length / bar.scale
    labels: list[tuple[float, str, str, bool]] = []
    if bar.limits:
        canvas.rect((x, top, BAR, length), FAINT, stroke=RULE)
    level = bottom
    for index, term in enumerate(bar.terms):
        height, color = term.value * pixels, PALETTE[index % len(PALETTE)]
        level -= height
        value = bar.text(term.value)
        tooltip = f"{term.name}: {value} = {term.formula}"
        canvas.rect(
            (x, level, BAR, height), color, tooltip=tooltip, term=term.name, value=f"{term.value:.6g}", bar=bar.title
        )
        share = term.value / max(total(bar.terms), 1e-12)
        percent = f"{share:.0%}" if share >= 0.01 else "<1%"
        labels.append((level + height / 2, f"{term.name}: {value} ({percent})", color, False))
    for name, limit in bar.limits:
        level = bottom - limit * pixels
        canvas.line([(x - 6, level), (x + BAR + 6, level)], INK, width=1.6, dash="5 3")
        labels.append((level, f"{name}: {bar.text(limit)}", INK, True))
    labels.sort(key=lambda each: each[0])
    for (anchor, text, color, is_limit), at in zip(
        labels, _spread([each[0] for each in labels], top, bottom), strict=True
    ):
        start = x + BAR + (6 if is_limit else 0)
        canvas.line([(start, anchor), (x + BAR + 12, anchor), (x + BAR + 30, at), (x + BAR + 36, at)], color)
        canvas.text(x + BAR + 42, at + 4, text, size=13, bold=is_limit)
    return bottom + 32


def _spread(anchors: Sequence[float], top: float, bottom: float) -> list[float]:
    """Return positions near sorted anchors, at least LABEL apart and not below `bottom`, if there is room."""
    positions: list[float] = []
    for anchor in anchors:
        positions.append(max(anchor, positions[-1] + LABEL if positions else top))
    limit = bottom
    for index in reversed(range(len(positions))):
        positions[index] = min(positions[index], limit)
        limit = positions[index] - LABEL
    return positions
