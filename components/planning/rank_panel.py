"""Nodes with their ranks, and the table of the axes, of the picture of a mesh; shapes and texts of its SVG file."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from components.config.schema.parallelism import AXES, ContextAttention, MeshShape, ParallelismConfig, Strategy

LEFT, WIDTH = 32.0, 1136.0
"""Left edge and width of the panels."""
_AXIS_COLORS = dict(zip(AXES, ("#7b3fb5", "#b85c00", "#1f6fb2", "#2e7d32", "#00808a", "#c62845"), strict=True))
MOST_NODES, MOST_RANKS_PER_NODE, MOST_SQUARES = 8, 64, 2048
"""Nodes and ranks of a node that are drawn in full, and nodes of the map."""
CELL, GAP, PAD = 62.0, 6.0, 12.0
INK, MUTED, RULE, PAPER, FAINT = "#1d2730", "#566470", "#c9d1d8", "#ffffff", "#f3f5f7"
"""Colors of texts, secondary texts, lines, the page, and boxes without emphasis."""
_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MARK = f'font-family="{_FONT}" role="img"'
"""Attributes in the second line of every picture, by which it is known as one."""
CHARACTER, _BOLD = 0.57, 0.66
"""Average width of a character as a share of the font size, in the widest of usual fonts, DejaVu Sans."""
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def draw_axes(canvas: SvgCanvas, y: float, layout: RankLayout, parallelism: ParallelismConfig) -> float:
    """Draw a row for each axis: degree, what its collectives move, and rank 0's group. Return the y below."""
    canvas.text(LEFT, y + 16, "Mesh axes", size=16, bold=True)
    y += 40
    columns = (LEFT + 24, LEFT + 170, LEFT + 290, LEFT + 480, LEFT + 620)
    for x, name in zip(columns, ("axis", "groups", "group of rank 0", "it spans", "its collectives move"), strict=True):
        canvas.text(x, y, name, color=MUTED)
    if not layout.axes:
        canvas.text(LEFT + 24, y + 24, "no axis is larger than 1: one process, no collectives", size=13)
        return y + 48
    for axis in layout.axes:
        y += 24
        color, degree, nodes = _AXIS_COLORS[axis], layout.mesh.degree(axis), layout.nodes_of(axis)
        canvas.rect((LEFT, y - 12, 15, 15), tinted(color, 0.22), stroke=color, stroke_width=1.5, radius=3)
        canvas.text(columns[0], y, f"{axis} = {degree:,}", size=13, color=color, bold=True)
        number = layout.mesh.world // degree
        canvas.text(columns[1], y, f"{number:,} of {degree:,} ranks", size=13)
        canvas.text(columns[2], y, _ranks_text(layout.group(axis)), size=13)
        canvas.text(columns[3], y, "one node" if nodes == 1 else f"{nodes:,} nodes", size=13)
        lines = wrapped(_movement(axis, layout, parallelism), WIDTH - columns[4] + LEFT, 12.5)
        for index, line in enumerate(lines):
            canvas.text(columns[4], y + 16 * index, line, size=12.5)
        y += 16 * (len(lines) - 1)
    return y + 28


def _movement(axis: str, layout: RankLayout, parallelism: ParallelismConfig) -> str:
    """Return what the collectives of an axis move."""
    mesh = layout.mesh
    shards = [each for each in ("dp_shard", "ep", "cp") if mesh.degree(each) > 1]
    size = mesh.dp_shard * mesh.ep * mesh.cp
    together = f", over {' x '.join(shards)} = {size:,} ranks" if len(shards) > 1 else ""
    keys = {
        ContextAttention.ulysses: "queries, keys, values and outputs of attention (all-to-all)",
        ContextAttention.all_gather: "keys and values (all-gather)",
        ContextAttention.auto: "queries, keys and values (all-to-all, or all-gather of keys and values)",
    }[parallelism.cp_attention]
    hidden = "all-gather and reduce-scatter" if parallelism.sequence_parallel else "all-reduce"
    sharded = parallelism.strategy is Strategy.fsdp2
    also = "; dense parameters are sharded over it too" if sharded else ""
    return {
        "pp": "hidden states to the next stage, their gradients back (send and receive)",
        "dp_replicate": "gradients (all-reduce)" + (" of each shard" if sharded and size > 1 else ""),
        "dp_shard": f"parameters of each layer (all-gather), gradients (reduce-scatter){together}",
        "ep": f"tokens to the ranks of their experts, and back (all-to-all){also}",
        "cp": f"{keys}{also}",
        "tp": f"hidden states at attention and MLP of each layer ({hidden})",
    }[axis]


def draw_ranks(canvas: SvgCanvas, y: float, layout: RankLayout) -> float:
    """Draw nodes with their ranks, all of them or some in full and a map of the others. Return the y below."""
    shown = _shown_nodes(layout)
    canvas.text(LEFT, y + 16, "Ranks on nodes", size=16, bold=True)
    caption: list[tuple[str, str]] = [("Each box is a global rank", MUTED)]
    if layout.axes:
        caption += [(", below it its coordinates (", MUTED)]
        for index, axis in enumerate(layout.axes):
            caption += [(", ", MUTED)] * bool(index) + [(axis, _AXIS_COLORS[axis])]
        caption += [("). Dark: rank 0. Colored: the other ranks of its group on each axis.", MUTED)]
    canvas.text(LEFT, y + 38, caption, size=12.5)
    y += 52
    columns = min(8, layout.ranks_per_node, layout.mesh.world)
    width = columns * (CELL + GAP) - GAP + 2 * PAD
    per_row = max(1, int((WIDTH + PAD) // (width + PAD)))
    height = 0.0
    for index, node in enumerate(shown):
        if index and index % per_row == 0:
            y += height + PAD
            height = 0.0
        height = max(height, _draw_node(canvas, LEFT + index % per_row * (width + PAD), y, layout, node))
    y += height
    if len(shown) < layout.nodes:
        y += 24
        text = f"{len(shown)} of {layout.nodes:,} nodes in full; {layout.nodes:,} nodes like this, in the map below"
        canvas.text(LEFT, y, text, size=13, bold=True)
        y = _draw_map(canvas, y + 14, layout)
    return y + 24


def _shown_nodes(layout: RankLayout) -> list[int]:
    """Return the nodes to draw in full: all, or node 0 and the next one of each group of rank 0 that leaves it."""
    if layout.nodes <= MOST_NODES:
        return list(range(layout.nodes))
    found = {0}
    for axis in reversed(layout.axes):
        found |= set(
            [rank // layout.ranks_per_node for rank in layout.group(axis) if rank >= layout.ranks_per_node][:1]
        )
    return sorted(found)[:4]


def _draw_node(canvas: SvgCanvas, x: float, y: float, layout: RankLayout, node: int) -> float:
    """Draw a node with its ranks; return its height."""
    ranks = layout.node(node)
    drawn = ranks[:MOST_RANKS_PER_NODE]
    columns = min(8, layout.ranks_per_node, layout.mesh.world)
    lines = 1 if len(layout.axes) < 4 else 2
    cell = 32.0 + 14 * lines
    rows = -(-len(drawn) // columns)
    more = 18.0 if len(drawn) < len(ranks) else 0.0
    height = 26 + rows * (cell + GAP) - GAP + PAD + more
    width = columns * (CELL + GAP) - GAP + 2 * PAD
    canvas.rect((x, y, width, height), PAPER, stroke="#8a98a5", stroke_width=1.2, radius=8, node=node)
    name = [(f"node {node:,}", INK), (f"   ranks {_ranks_text(ranks)}" if width > 200 else "", MUTED)]
    canvas.text(x + PAD, y + 18, name, size=12, bold=True)
    for index, rank in enumerate(drawn):
        row, column = divmod(index, columns)
        box = (x + PAD + column * (CELL + GAP), y + 26 + row * (cell + GAP), CELL, cell)
        _draw_rank(canvas, box, layout, rank, lines)
    if more:
        text = f"and {len(ranks) - len(drawn):,} more ranks in the same order"
        canvas.text(x + PAD, y + height - 9, text, color=MUTED)
    return height


def _draw_rank(
    canvas: SvgCanvas, box: tuple[float, float, float, float], layout: RankLayout, rank: int, lines: int
) -> None:
    axis = layout.axis_of(rank)
    color = INK if rank == 0 else RULE if axis is None else _AXIS_COLORS[axis]
    fill = INK if rank == 0 else FAINT if axis is None else tinted(color, 0.22)
    coordinates = {each: layout.coordinate(rank, each) for each in layout.axes}
    stated = " ".join(f"{each}={value}" for each, value in coordinates.items())
    groups = "; ".join(f"{each} group: {_ranks_text(layout.group(each, rank))}" for each in layout.axes)
    canvas.rect(
        box,
        fill,
        stroke=color,
        stroke_width=1.0 if axis is None else 1.8,
        radius=5,
        tooltip=f"rank {rank}: {stated}; {groups}",
        rank=rank,
        coordinates=stated,
        group=axis or "",
    )
    x, y, width, _ = box
    canvas.text(x + width / 2, y + 19, f"{rank}", size=15, bold=True, anchor="middle", color=PAPER if not rank else INK)
    values = list(coordinates.items())
    half = len(values) if lines == 1 else -(-len(values) // 2)
    for line in range(lines):
        parts: list[tuple[str, str]] = []
        for each, value in values[line * half : (line + 1) * half]:
            parts += [(" ", MUTED)] * bool(parts)
            parts += [(str(value), PAPER if rank == 0 else _AXIS_COLORS[each])]
        canvas.text(x + width / 2, y + 36 + 14 * line, parts, size=12, anchor="middle")


def _draw_map(canvas: SvgCanvas, y: float, layout: RankLayout) -> float:
    """Draw a square for each node; return the y below."""
    number = min(layout.nodes, MOST_SQUARES)
    per_stage = layout.nodes // layout.mesh.pp
    by_stage = layout.mesh.pp > 1 and layout.nodes % layout.mesh.pp == 0 and 4 <= per_stage <= 64
    columns = per_stage if by_stage else min(64, -(-number // 4))
    step = min(24.0, (WIDTH - 90) / columns)
    for node in range(number):
        row, column = divmod(node, columns)
        x, top, side = LEFT + 90 + column * step, y + row * step, step - 3
        axes = layout.node_axes(node)
        if column == 0:
            label = f"pp {row}: {node:,}" if by_stage else f"node {node:,}"
            canvas.text(LEFT + 82, top + side - 3, label, size=11, color=MUTED, anchor="end")
        tooltip = f"node {node}: ranks {_ranks_text(layout.node(node))}"
        canvas.rect((x, top, side, side), FAINT, stroke=RULE, radius=2, tooltip=tooltip, square=node)
        for index, axis in enumerate(axes):
            canvas.rect((x, top + index * side / len(axes), side, side / len(axes)), _AXIS_COLORS[axis])
    y += -(-number // columns) * step + 14
    text = "Each square is a node, in color if it holds ranks of rank 0's group on that axis."
    if number < layout.nodes:
        text += f" The first {number:,} of {layout.nodes:,} nodes."
    canvas.text(LEFT, y, text, size=12.5, color=MUTED)
    return y


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks of a mesh on nodes. The axes are ordered pp, dp_replicate, dp_shard, ep, cp, tp; tp varies fastest, and
    consecutive ranks fill node after node."""

    mesh: MeshShape
    ranks_per_node: int

    @property
    def axes(self) -> list[str]:
        """Axes larger than 1, outermost first."""
        return [axis for axis in AXES if self.mesh.degree(axis) > 1]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.mesh.world / self.ranks_per_node)

    def stride(self, axis: str) -> int:
        """Return the distance of neighbors on an axis: the product of the degrees inside of it."""
        return math.prod(self.mesh.degree(inner) for inner in AXES[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank on an axis."""
        return rank // self.stride(axis) % self.mesh.degree(axis)

    def group(self, axis: str, rank: int = 0) -> range:
        """Return the ranks of the group of `rank` on an axis."""
        stride = self.stride(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return range(first, first + stride * self.mesh.degree(axis), stride)

    def axis_of(self, rank: int) -> str | None:
        """Return the axis whose group of rank 0 has `rank`; None for rank 0 itself and ranks of no such group.

        There is at most one: a member of the group differs from rank 0 in the coordinate of this axis only.
        """
        others = [axis for axis in self.axes if self.coordinate(rank, axis)]
        return others[0] if len(others) == 1 else None

    def node(self, number: int) -> range:
        """Return the ranks of a node."""
        first = number * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.mesh.world))

    def node_axes(self, number: int) -> list[str]:
        """Return the axes whose group of rank 0 has ranks on a node, outermost first."""
        ranks = self.node(number)
        found = {axis for axis in self.axes if any(each in ranks for each in self.group(axis))}
        return [axis for axis in self.axes if axis in found]

    def nodes_of(self, axis: str) -> int:
        """Return the number of nodes that rank 0's group on an axis has ranks on."""
        return len({rank // self.ranks_per_node for rank in self.group(axis)})


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks at equal distances as text: `0, 8, 16, ..., 56`, or `0-7` for more than four neighbors."""
    if len(ranks) > 4 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    listed = [str(rank) for rank in ranks]
    return ", ".join(listed if len(listed) <= 5 else [*listed[:3], "...", listed[-1]])


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
