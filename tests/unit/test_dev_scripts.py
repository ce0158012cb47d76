"""scripts/dev: pairs from gsm8k, and the count of files, names, circles and reach of the code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.dev import check_sizes
from scripts.dev.check_sizes import problems_of_folders, problems_of_structure
from scripts.dev.measure_structure import ROOT, Structure, code_lines

SCRIPT = Path(__file__).parents[2] / "scripts" / "dev" / "gsm8k_pairs.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Problems a + b with results of two and three digits, one without an equation, and one with a fraction."""
    rows = []
    for number in range(60):
        first, second = 10 + number, 2 * number
        steps = f"There are {first} apples.\nTogether {first} + {second} = <<{first}+{second}={first + second}>>"
        rows.append(
            {"question": f"Problem {number}?", "answer": f"{steps}{first + second} apples.\n#### {first + second}"}
        )
    rows.append({"question": "No equation?", "answer": "He has seven.\n#### 7"})
    rows.append({"question": "A fraction?", "answer": "Half: 1 / 2 = 0.5\n#### 0.5"})
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_pairs_differ_in_the_result_of_the_last_equation_only(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "pairs.jsonl")
    assert done.returncode == 0, done.stderr
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert 50 <= len(pairs) <= 60
    results, others = [], []
    for pair in pairs:
        number = int(pair["prompt"].split()[1][:-1])
        steps, _, result = pair["chosen"].rpartition("\n#### ")
        assert steps == f"There are {10 + number} apples.\nTogether {10 + number} + {2 * number}"
        assert int(result) == 10 + 3 * number
        wrong_steps, _, wrong = pair["rejected"].rpartition("\n#### ")
        assert wrong_steps == steps
        assert wrong != result
        assert len(wrong) == len(result)
        results.append(result)
        others.append(wrong)
    if len(pairs) == 60:
        assert Counter(results) == Counter(others)
    assert run(source, tmp_path / "again.jsonl", "--pairs", 5).returncode == 0
    assert (tmp_path / "again.jsonl").read_text().splitlines() == (tmp_path / "pairs.jsonl").read_text().splitlines()[
        :5
    ]


def test_other_files_exit_with_2_and_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "hello"}\n')
    for path, message in (
        (tmp_path / "text.jsonl", "not JSON lines with the keys question and answer"),
        (tmp_path / "missing.jsonl", "not JSON lines with the keys question and answer"),
    ):
        done = run(path, tmp_path / "out.jsonl")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr
    done = run(source, tmp_path / "out.jsonl", "--max-length", 5)
    assert done.returncode == 2
    assert "no problem ends in an equation" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


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
