"""Lines of the tools' output in a terminal of 80 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from components.terminal import fit, fit_command, fit_table
from tests.config.commands import REPOSITORY, Commands

TOOLS = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("scripts", "scripts/benchmark", "scripts/dev")
    for path in (REPOSITORY / folder).glob("*.py")
    if "ArgumentParser(" in path.read_text() or folder == "scripts"
)


@pytest.mark.parametrize("tool", [each for each in TOOLS if each.name != "__init__.py"], ids=str)
def test_help_fits_the_terminal(commands: Commands, tmp_path: Path, tool: Path) -> None:
    """The words of the help are those of a wide terminal."""
    narrow, wide = (commands.run(REPOSITORY / tool, ["--help"], tmp_path, COLUMNS=each) for each in ("80", "200"))
    assert (narrow.status, narrow.errors) == (0, "")
    assert [line for line in narrow.output.splitlines() if len(line) > 80] == []
    words = [
        re.sub(r" [\\\\#](?=\n)|\n +#", " ", each).replace("#", " ").split() for each in (narrow.output, wide.output)
    ]
    assert words[0] == words[1]  # none is cut or lost


def test_a_line_that_fits_is_not_changed_and_others_lose_no_word() -> None:
    text = (
        "One sentence that is too long for it.\n\n- an entry, which is too long\n  name   what it means, at length\n\nshort"
    )
    assert fit(text, 80) == text
    assert fit(text, 25).splitlines() == [
        "One sentence that is too",
        "long for it.",
        "",
        "- an entry, which is",
        "  too long",
        "  name   what it means,",
        "         at length",
        "",
        "short",
    ]
    command = "python train.py name='a  b' --top-p 0.9 lr=1 # train"
    assert fit(command, 24).splitlines() == [
        "python train.py \\",
        "    name='a  b' \\",
        "    --top-p 0.9 lr=1",
        "    # train",
    ]
    assert fit_command("python a.py b=1", 80) == ["python a.py b=1"]


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
