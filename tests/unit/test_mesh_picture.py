"""The picture of a mesh: every rank, the groups of the axes, memory and schedule, read back from the SVG."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from components.config.schema.parallelism import MeshShape, ParallelismConfig, PipelineSchedule
from components.planning.formulas.pipeline import StageSeconds
from components.planning.formulas.workload import Term, bytes_text, seconds_text
from components.planning.mesh_picture import _MeshPicture, _Schedule, _TermBar, render_mesh
from tests.browser import lay_out

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def rectangles(picture: _MeshPicture, attribute: str) -> list[dict[str, str]]:
    """Return the attributes of the rectangles that have one named `attribute`."""
    root = ElementTree.fromstring(render_mesh(picture))
    return [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}rect") if attribute in each.attrib]


def drawing(mesh: MeshShape, ranks_per_node: int = 8, pp_schedule: str = "1F1B", **others: object) -> _MeshPicture:
    parallelism = ParallelismConfig(pp=mesh.pp, pp_schedule=PipelineSchedule(pp_schedule))
    values = {"title": "a mesh", "facts": (), "parallelism": parallelism, **others}
    return _MeshPicture(mesh=mesh, ranks_per_node=ranks_per_node, **values)


def schedule(name: str, pp: int, micro_batches: int) -> _Schedule:
    parallelism = ParallelismConfig(pp=pp, pp_schedule=PipelineSchedule(name))
    stages = (StageSeconds(0.1, 0.25, 0.1),) * len(parallelism.stage_ranks(pp))
    return _Schedule(micro_batches, stages, send_seconds=0.01)


def layout_problems(svg: str) -> list[str]:
    """Return the texts that leave the page or overlap another one, by estimated widths."""
    root = ElementTree.fromstring(svg)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    boxes = list(text_boxes(root, styles(root), 0.0, 0.0))
    found = [
        f"outside: {text}"
        for text, (x, y, right, bottom) in boxes
        if x < left or y < top or right > left + width or bottom > top + height
    ]
    for (one, first), (other, second) in combinations(sorted(boxes, key=lambda each: each[1][1]), 2):
        if min(first[2], second[2]) - max(first[0], second[0]) > 0.5 and first[3] - second[1] > 0.5:
            found.append(f"overlap: {one} | {other}")
    return found


def styles(root: ElementTree.Element) -> dict[str, str]:
    """Return the declarations of each class of the style sheet."""
    found: dict[str, str] = defaultdict(str)
    for names, rule in re.findall(r"([^{}]+)\{([^{}]+)\}", root.findtext(f"{SVG}style", "")):
        for name in re.findall(r"(?:^|,)\s*\.(\w[\w-]*)\s*(?=,|$)", names):
            found[name] += rule
    return found


def text_boxes(
    element: ElementTree.Element, rules: dict[str, str], x: float, y: float
) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Yield each part of a text that has a place of its own, with left, top, right and bottom."""
    if (moved := re.match(r"translate\((\S+) (\S+)\)", element.get("transform", ""))) is not None:
        x, y = x + float(moved[1]), y + float(moved[2])
    for each in element:
        if each.tag != f"{SVG}text":
            yield from text_boxes(each, rules, x, y)
            continue
        rule = "".join(rules[name] for name in each.get("class", "").split())
        size = float(match[1]) if (match := re.search(r"font-size: (\d+)px", rule)) else 13.0
        parts = [(float(each.get("x", 0)), each.text or "", rule)]
        for part in each:
            text = (part.text or "") + (part.tail or "")
            if "x" in part.attrib:
                own = "".join(rules[name] for name in part.get("class", "").split())
                parts.append((float(part.attrib["x"]), text, rule + own))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + text, parts[-1][2])
        baseline = y + float(each.get("y", 0))
        for start, text, style in parts:
            widths = {"F": 1.0, "W": 1.0}
            average = 0.66 if "bold" in style else 0.57
            length = size * sum(widths.get(unicodedata.east_asian_width(one), average) for one in text)
            length = float(each.get("textLength", length))
            at = x + start - length * (0.5 if "middle" in rule else 1.0 if "end" in rule else 0.0)
            if text.strip():
                yield text, (at, baseline - 0.75 * size, at + length, baseline + 0.2 * size)


@pytest.mark.parametrize(
    "mesh", [MeshShape(pp=2, dp_shard=2, tp=2), MeshShape(dp_replicate=2, dp_shard=2, ep=2, tp=2), MeshShape(cp=8)]
)
def test_every_rank_is_drawn_once_with_its_coordinates(mesh: MeshShape) -> None:
    cells = rectangles(drawing(mesh, 4), "data-rank")
    degrees = [("pp", mesh.pp), ("dp_replicate", mesh.dp_replicate), ("dp_shard", mesh.dp_shard), ("ep", mesh.ep)]
    degrees = [each for each in [*degrees, ("cp", mesh.cp), ("tp", mesh.tp)] if each[1] > 1]
    expected = [
        " ".join(f"{axis}={value}" for (axis, _), value in zip(degrees, values, strict=True))
        for values in product(*(range(degree) for _, degree in degrees))
    ]
    assert [(int(each["data-rank"]), each["data-coordinates"]) for each in cells] == list(enumerate(expected))


def test_colored_ranks_are_the_groups_of_rank_0() -> None:
    cells = rectangles(drawing(MeshShape(pp=2, dp_shard=2, ep=2, tp=2)), "data-rank")
    found = {axis: [int(each["data-rank"]) for each in cells if each["data-group"] == axis] for axis in ("pp", "tp")}
    found |= {axis: [int(each["data-rank"]) for each in cells if each["data-group"] == axis] for axis in ("ep",)}
    found["dp_shard"] = [int(each["data-rank"]) for each in cells if each["data-group"] == "dp_shard"]
    # rank = 8 pp + 4 dp_shard + 2 ep + tp
    assert found == {"pp": [8], "dp_shard": [4], "ep": [2], "tp": [1]}


@pytest.mark.parametrize(("mesh", "per_node"), [(MeshShape(pp=8, dp_shard=64, tp=8), 8), (MeshShape(dp_shard=4096), 1)])
def test_a_large_world_is_a_map_with_a_few_nodes_in_full(mesh: MeshShape, per_node: int) -> None:
    picture = drawing(mesh, per_node)
    nodes, squares = rectangles(picture, "data-node"), rectangles(picture, "data-square")
    assert 1 <= len(nodes) <= 4
    assert len(squares) == min(4096 // per_node, 2048)
    text = render_mesh(picture)
    assert f"{len(nodes)} of {4096 // per_node:,} nodes in full" in text
    assert len(text) < 1_000_000
    assert float(ElementTree.fromstring(text).attrib["height"]) < 2000


def test_memory_segments_are_as_high_as_their_bytes_and_stack_up() -> None:
    sizes = {"parameters": 10 * GIB, "gradients": 5 * GIB, "activations": 25 * GIB}
    terms = tuple(Term(name, size, "") for name, size in sizes.items())
    bar = _TermBar("memory", terms, bytes_text, (("device", 80.0 * GIB),))
    segments = rectangles(drawing(MeshShape(), bars=(bar,)), "data-term")
    heights = {each["data-term"]: float(each["height"]) for each in segments}
    assert heights == pytest.approx({"parameters": 37.5, "gradients": 18.75, "activations": 93.75}, abs=2e-3)
    for below, above in pairwise(segments):
        assert float(above["y"]) + float(above["height"]) == pytest.approx(float(below["y"]), abs=2e-3)


@pytest.mark.parametrize(("name", "pp", "number"), [("1F1B", 4, 8), ("1F1B", 3, 100), ("Interleaved1F1B", 4, 8)])
def test_the_timeline_keeps_the_order_of_stages(name: str, pp: int, number: int) -> None:
    drawn = schedule(name, pp, number)
    picture = drawing(MeshShape(pp=pp), pp_schedule=name, schedule=drawn)
    boxes = rectangles(picture, "data-micro-batch")
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    forwards: dict[tuple[int, int], tuple[float, float]] = {}
    for each in boxes:
        span = (float(each["x"]), float(each["x"]) + float(each["width"]))
        spans[each["data-pp-rank"]].append(span)
        if each["data-kind"] == "F":
            forwards[int(each["data-micro-batch"]), int(each["data-stage"])] = span
    for of_rank in spans.values():
        for before, after in pairwise(sorted(of_rank)):
            assert after[0] >= before[1] - 0.01, "two boxes of a rank overlap"
    stages = len(drawn.stages)
    micro_batches = min(number, 16 // pp * pp)
    assert sorted(forwards) == list(product(range(micro_batches), range(stages)))
    for (micro_batch, stage), span in forwards.items():
        if stage:
            assert span[0] > forwards[micro_batch, stage - 1][1], "a stage starts before its input has arrived"
    assert ("Cut: " in render_mesh(picture)) == (number > micro_batches)


def test_any_title_gives_valid_xml_and_the_same_text_twice() -> None:
    title = 'a < b & "c" \x00\x1b \ud800 ]]> \''
    text = render_mesh(drawing(MeshShape(tp=2), title=title))
    root = ElementTree.fromstring(text.encode())
    assert root.findtext("{http://www.w3.org/2000/svg}title") == 'a < b & "c" ?? ? ]]> \''
    assert text == render_mesh(drawing(MeshShape(tp=2), title=title))


def terms(number: int) -> tuple[Term, ...]:
    names = ("activations of the layers between two checkpoints", "all-gather of the parameters over dp_shard", "loss")
    return tuple(Term(f"{names[each % 3]} {each}", GIB / 3**each, "") for each in range(number))


def pictures() -> list[_MeshPicture]:
    """Return pictures with long texts, narrow boxes, many labels, and every part."""
    limits = (("memory of NVIDIA H100 80GB HBM3", 80.0 * GIB), ("measured peak of rank 0", 79.9 * GIB))
    memory = _TermBar("Memory of the fullest rank", terms(3), bytes_text, limits)
    time = _TermBar(
        "Time of an optimizer step", tuple(Term(f"a term {each}", 0.1, "") for each in range(20)), seconds_text
    )
    title = "Qwen3-30B-A3B-Instruct-2507 on a_long_corpus_of_many_documents.jsonl: pp=2 x dp_replicate=2 x dp_shard=2"
    axes = MeshShape(pp=2, dp_replicate=2, dp_shard=2, ep=2, cp=2, tp=2)
    facts = ("/a/very/long/path" * 20, "when " * 60)
    found = [
        drawing(MeshShape(), facts=("one process",)),
        drawing(MeshShape(dp_replicate=2), 2, bars=(time,)),
        drawing(axes, title=title, facts=facts, bars=(memory, time), schedule=schedule("1F1B", 2, 1024)),
        drawing(
            MeshShape(pp=64, dp_shard=64, tp=8), title="x" * 300, bars=(memory,), schedule=schedule("1F1B", 64, 64)
        ),
        drawing(MeshShape(dp_replicate=1024), title="W" * 100 + "\u540d" * 300 + " MEMORY" * 30),
        drawing(MeshShape(dp_shard=4096), 1),
        drawing(MeshShape(dp_shard=2, tp=128), 128),
    ]
    for name in PipelineSchedule:
        found.append(drawing(MeshShape(pp=4), pp_schedule=name, schedule=schedule(name, 4, 100)))
    return found


def test_no_text_leaves_the_page_or_overlaps_another() -> None:
    for picture in pictures():
        assert layout_problems(render_mesh(picture)) == [], picture.title
    drawn = render_mesh(drawing(MeshShape(tp=2)))
    for x, y, problem in ((60, 44, "overlap: a mesh | more"), (1130, 2, "outside: more"), (1150, 44, "outside: more")):
        planted = drawn.replace("</svg>", f'<text x="{x}" y="{y}">more</text></svg>')
        assert layout_problems(planted) == [problem]


def test_texts_are_whole_and_apart_in_a_browser(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.svg" for number in range(len(pictures()))]
    for file, picture in zip(files, pictures(), strict=True):
        file.write_text(render_mesh(picture), encoding="utf-8")
    for page in lay_out(files, [1280]):
        assert page.overlaps() == []
        assert page.outside() == []
        nodes = [page.words[index : index + 3] for index, word in enumerate(page.words) if word.text == "node"]
        gaps = [ranks.boxes[0][0] - number.boxes[0][2] for _, number, ranks in nodes if ranks.text == "ranks"]
        assert all(gap > 8 for gap in gaps)  # three spaces
