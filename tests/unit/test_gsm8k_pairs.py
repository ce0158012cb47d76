"""scripts/dev/gsm8k_pairs.py: both answers have one form, and the numbers alone do not tell them apart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

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
