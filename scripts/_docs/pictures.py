"""Pictures of the walks."""

from __future__ import annotations

from components.planning.rank_panel import FAINT, INK, MUTED, RULE, SvgCanvas, text_width
from scripts._docs.walks import Walk

ROW, GAP, TOP, MARGIN = 40.0, 14.0, 44.0, 12.0
BOX = 400.0
ACCENT = "#2f6f9f"


def draw(walk: Walk) -> str:
    """Return the SVG of a walk: a box per stop with its function and file, and what happens beside it."""
    canvas = SvgCanvas()
    canvas.text(MARGIN, 26, walk.title, size=15, bold=True)
    texts = MARGIN + BOX + 16
    for number, stop in enumerate(walk.stops):
        y = TOP + number * (ROW + GAP)
        canvas.rect((MARGIN, y, BOX, ROW), FAINT, stroke=RULE, radius=5)
        canvas.rect((MARGIN, y, 4, ROW), ACCENT)
        canvas.text(MARGIN + 14, y + 17, stop.name or stop.file.rpartition("/")[2], size=13, bold=True)
        canvas.text(MARGIN + 14, y + 32, stop.file, size=11, color=MUTED)
        canvas.text(texts, y + 24, stop.text, size=12.5, color=INK)
        if number:
            middle = MARGIN + 24
            canvas.line([(middle, y - GAP), (middle, y - 1)], MUTED, width=1.5)
            canvas.line([(middle - 4, y - 6), (middle, y - 1), (middle + 4, y - 6)], MUTED, width=1.5)
    width = texts + max(text_width(stop.text, 12.5) for stop in walk.stops) + MARGIN
    return canvas.document(width, TOP + len(walk.stops) * (ROW + GAP), walk.title)
