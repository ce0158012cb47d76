"""The count of files, names, circles and reach, on a tree of a few files, and the limits of this checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.dev import check_sizes
from scripts.dev.check_sizes import problems_of_folders, problems_of_structure
from scripts.dev.measure_structure import ROOT, Structure, code_lines

FILES = {
    "components/__init__.py": "",
    "components/part/__init__.py": "from components.part.one import build\n",
    "components/part/one.py": "from components.part.two import SIZE\n\n\ndef build(): ...\n",
    "components/part/two.py": "SIZE = 1\n\n\ndef late():\n    from components.part.one import build\n",
    "components/crumb.py": "LIMIT = 3\n_PRIVATE = 4\nlower = 5\n",
    "components/long.py": "class Names: ...\n" + "# a line\n" * 120,
    "components/user.py": "from components import crumb, long\nfrom components.part import two\n\nSIZE = crumb.LIMIT\n",
    "recipes/__init__.py": "",
    "recipes/train.py": "from components import part, user\n\npart.build()\n",
    "recipes/plain.py": "from components.crumb import LIMIT\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_circles_repeated_names_and_crumbs_are_counted(tree: Path) -> None:
    structure = Structure.read(tree)
    assert structure.circles == [["components.part.one", "components.part.two"]]
    assert structure.repeated == {"SIZE": 2}
    assert structure.crumbs == ["components.user"]
    figures = structure.figures()
    assert (figures["files"], figures["folders"], figures["circles"]) == (7, 2, 1)
    assert (figures["modules_with_one_importer"], figures["of_them_below_120_lines"]) == (2, 1)
    assert structure.public == {"build": 1, "SIZE": 2, "late": 1, "LIMIT": 1, "Names": 1}
    assert figures["public_names_per_kcode"] == round(1000 * 6 / figures["code_lines"], 1)


def test_reach_follows_attributes_of_packages(tree: Path) -> None:
    figures = Structure.read(tree).figures()
    assert (figures["reach_of_train"], figures["reach_of_plain"]) == (5, 1)


def test_figures_above_their_limits_are_reported(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"circles": 0, "names_defined_twice": 0, "of_them_below_120_lines": 1, "reach_of_train": 5}
    monkeypatch.setattr(check_sizes, "STRUCTURE", limits | {"reach_of_train_step": 0})
    assert list(problems_of_structure(tree)) == [
        "components: names_defined_twice is 1, at most 0; measure_structure.py --list shows what counts",
        "components: circles is 1, at most 0; measure_structure.py --list shows what counts",
        "components: reach_of_plain is 1 and has no limit; add one to STRUCTURE in check_sizes.py",
    ]


def test_a_folder_holds_at_most_twenty_files() -> None:
    files = [ROOT / "components" / "part" / f"file_{number}.py" for number in range(21)]
    assert list(problems_of_folders(files[:20])) == []
    assert list(problems_of_folders(files)) == ["components/part: 21 Python files, at most 20"]


def test_docstrings_comments_and_empty_lines_are_no_code() -> None:
    text = (
        '"""Text\nof two lines."""\n\n# comment\nX = 1\n"""Text of X."""\n\n\ndef f():\n    """Text."""\n    return 2\n'
    )
    assert code_lines(text, ast.parse(text)) == 3


def test_every_recipe_and_figure_has_its_limit() -> None:
    figures = Structure.read(ROOT).figures()
    assert check_sizes.STRUCTURE.keys() <= figures.keys()
    assert {name for name in figures if name.startswith("reach_of_")} <= check_sizes.STRUCTURE.keys()
