"""Lines of the tools' output in a terminal of 80 columns."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from components.planning.simulation import SimulatedRank, SimulatedTraffic, simulation_lines
from components.terminal import fit, fit_command, fit_table
from tests.config.commands import REPOSITORY, Commands

SCRIPTS = REPOSITORY / "scripts"


@pytest.mark.parametrize("tool", ["plan", "teacher", "doctor", "export"])  # teacher: as recipes print it
def test_help_fits_the_terminal(commands: Commands, tmp_path: Path, tool: str) -> None:
    shown = commands.run(SCRIPTS / f"{tool}.py", ["--help"], tmp_path, COLUMNS="80")
    assert (shown.status, shown.errors) == (0, "")
    assert [line for line in shown.output.splitlines() if len(line) > 80] == []


def test_every_parser_fits_its_help_into_the_terminal() -> None:
    """Also those of benchmarks, which import torch."""
    parsers = [
        (file, call)
        for file in SCRIPTS.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("ArgumentParser", "_Parser"))
    ]
    assert len(parsers) > 25
    for file, call in parsers:
        assert any(each.arg == "formatter_class" and ast.unparse(each.value) == "HelpText" for each in call.keywords), (
            file
        )


def test_a_line_that_fits_is_not_changed_and_others_lose_no_word() -> None:
    text = "One sentence that is too long for it.\n\n- an entry, which is too long\n  name   its long meaning\n\nend"
    assert fit(text, 80) == text
    assert fit(text, 24).splitlines() == [
        "One sentence that is too",
        "long for it.",
        "",
        "- an entry, which is too",
        "  long",
        "  name   its long",
        "         meaning",
        "",
        "end",
    ]
    command = "python train.py name='a  b' --top-p 0.9 lr=1 # train"
    assert fit(command, 24).splitlines() == [
        "python train.py \\",
        "    name='a  b' \\",
        "    --top-p 0.9 lr=1",
        "    # train",
    ]
    assert fit_command("python a.py b=1", 80) == ["python a.py b=1"]


def test_a_played_step_fits_the_terminal_and_no_line_joins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    traffic = [SimulatedTraffic(f"dp_shard x cp {each}", "reduce_scatter", 16, 1000 * each) for each in range(3)]
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer", "average", "frozen", "buffers", "saved"), 3 * 2**30)
    run = SimulatedRank(
        rank=12, world=64, mesh="", coordinates="", peak=11 * 2**30, peak_operator="aten::_log_softmax_backward_data",
        peak_phase="backward", groups=(), traffic=tuple(traffic), micro_batches=1, micro_batch_rows=1, cpu_seconds=3,
        resident_bytes=1, notes=("one", "two " * 30), **sizes,
    )  # fmt: skip
    lines = simulation_lines([run, run, run], 10 * 2**30)
    assert max(map(len, lines)) <= 80
    assert [line.strip().partition(": ")[0] for line in lines if "reduce_scatter" in line] == [
        each.group for each in traffic
    ]
    assert lines[0] == "11.0 GiB on rank 12 (formulas 10.0 GiB, -9.1%)"
    assert "    note: one" in lines


def test_a_table_in_markdown_has_columns_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "| mesh | seconds of a step | interval |\n|---|---|---|\n| dp_shard 2 | 0.123 | 11 min |"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert fit(lines, 32).splitlines() == [
        "            seconds of",
        "mesh            a step  interval",
        "dp_shard 2       0.123    11 min",
    ]
    monkeypatch.undo()
    assert fit(lines, 30) == lines  # a file


def test_a_table_wraps_texts_and_headers_but_no_number() -> None:
    header, rows = ("row", "mesh", "tokens/s per rank"), [("1", "dp_shard=2 tp=4", "12,345,678")]
    assert fit_table(header, rows, {1}, 80) == [
        ["row  mesh             tokens/s per rank"],
        ["  1  dp_shard=2 tp=4         12,345,678"],
    ]
    assert fit_table(header, rows, {1}, 28) == [
        ["                    tokens/s", "row  mesh           per rank"],
        ["  1  dp_shard=2   12,345,678", "     tp=4"],
    ]
