"""The picture of a mesh: every rank, the groups of the axes, memory and schedule, read back from the SVG."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from components.config.schema.parallelism import MeshShape, ParallelismConfig, PipelineSchedule
from components.planning.formulas.pipeline import StageSeconds
from components.planning.formulas.workload import Term
from components.planning.mesh_picture import MeshPicture, ScheduleDrawing, TermBar, render_mesh
from components.planning.rank_panel import RankLayout
from tests.browser import lay_out

GIB = 2**30


def rectangles(picture: MeshPicture, attribute: str) -> list[dict[str, str]]:
    """Return the attributes of the rectangles that have one named `attribute`."""
    root = ElementTree.fromstring(render_mesh(picture))
    return [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}rect") if attribute in each.attrib]


def drawing(mesh: MeshShape, ranks_per_node: int = 8, **others: object) -> MeshPicture:
    values = {"title": "a mesh", "facts": (), "parallelism": ParallelismConfig(), **others}
    return MeshPicture(layout=RankLayout(mesh, ranks_per_node), **values)


def schedule(name: str, pp: int, micro_batches: int) -> ScheduleDrawing:
    parallelism = ParallelismConfig(pp=pp, pp_schedule=PipelineSchedule(name))
    stages = (StageSeconds(0.1, 0.25, 0.1),) * len(parallelism.stage_ranks(pp))
    return ScheduleDrawing(parallelism, pp, micro_batches, stages, send_seconds=0.01)


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
    assert max(float(each["y"]) for each in squares) < 2000


def test_memory_segments_are_as_high_as_their_bytes_and_stack_up() -> None:
    sizes = {"parameters": 10 * GIB, "gradients": 5 * GIB, "activations": 25 * GIB}
    terms = tuple(Term(name, size, "") for name, size in sizes.items())
    bar = TermBar("memory", terms, GIB, "GiB", (("device", 80.0 * GIB),))
    segments = rectangles(drawing(MeshShape(), memory=bar), "data-term")
    heights = {each["data-term"]: float(each["height"]) for each in segments}
    assert heights == pytest.approx({"parameters": 37.5, "gradients": 18.75, "activations": 93.75}, abs=2e-3)
    for below, above in pairwise(segments):
        assert float(above["y"]) + float(above["height"]) == pytest.approx(float(below["y"]), abs=2e-3)


@pytest.mark.parametrize(("name", "pp", "number"), [("1F1B", 4, 8), ("1F1B", 3, 100), ("Interleaved1F1B", 4, 8)])
def test_the_timeline_keeps_the_order_of_stages(name: str, pp: int, number: int) -> None:
    drawn = schedule(name, pp, number)
    boxes = rectangles(drawing(MeshShape(pp=pp), schedule=drawn), "data-micro-batch")
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
    assert ("Cut: " in render_mesh(drawing(MeshShape(pp=pp), schedule=drawn))) == (number > micro_batches)


def test_any_title_gives_valid_xml_and_the_same_text_twice() -> None:
    title = 'a < b & "c" \x00\x1b \ud800 ]]> \''
    text = render_mesh(drawing(MeshShape(tp=2), title=title))
    root = ElementTree.fromstring(text.encode())
    assert root.findtext("{http://www.w3.org/2000/svg}title") == 'a < b & "c" ?? ? ]]> \''
    assert text == render_mesh(drawing(MeshShape(tp=2), title=title))


def test_texts_are_whole_and_apart_in_a_browser(tmp_path: Path) -> None:
    names = ("activations of the layers between two checkpoints", "all-gather of the parameters over dp_shard", "loss")
    terms = tuple(Term(name, size * GIB, "") for name, size in zip(names, (20, 5, 0.01), strict=True))
    limits = (("memory of NVIDIA H100 80GB HBM3", 80.0 * GIB), ("measured peak of rank 0", 75.0 * GIB))
    many = tuple(Term(f"a term of the estimate {number}", GIB, "") for number in range(20))
    axes = MeshShape(pp=2, dp_replicate=2, dp_shard=2, ep=2, cp=2, tp=2)
    title = "Qwen3-30B-A3B-Instruct-2507 on a_long_corpus_of_many_documents.jsonl: pp=2 x dp_replicate=2 x dp_shard=2"
    pictures = [
        drawing(
            axes,
            title=title,
            facts=("/a/very/long/path" * 20,),
            memory=TermBar(
                "Memory of the fullest rank", terms, GIB, "GiB", limits, "25 GiB estimated; " + "when " * 30
            ),
            time=TermBar("Time of an optimizer step", terms, GIB, "ms"),
            schedule=schedule("Interleaved1F1B", 2, 1024),
        ),
        drawing(MeshShape(pp=64, dp_shard=64, tp=8), memory=TermBar("Memory", many, GIB, "GiB"), title="x" * 300),
        drawing(MeshShape(dp_shard=4), 1, schedule=schedule("1F1B", 4, 4)),
    ]
    files = [tmp_path / f"{number}.svg" for number in range(len(pictures))]
    for file, picture in zip(files, pictures, strict=True):
        file.write_text(render_mesh(picture))
    for page in lay_out(files, [1280]):
        assert page.overlaps() == []
        assert page.outside() == []
        nodes = [page.words[index : index + 3] for index, word in enumerate(page.words) if word.text == "node"]
        gaps = [ranks.boxes[0][0] - number.boxes[0][2] for _, number, ranks in nodes if ranks.text == "ranks"]
        assert all(gap > 8 for gap in gaps)  # three spaces
