"""Readable record of the parity grid: outputs/parity/grid.md, from the findings of all runs so far."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from tests.distributed.grid import Finding

FOLDER = Path(__file__).resolve().parents[2] / "outputs" / "parity"


def record(findings: list[Finding], folder: Path = FOLDER) -> None:
    """Under `make parity`, append findings to grid.jsonl and rewrite grid.md with the latest finding of each cell."""
    if os.environ.get("MESHBOOK_ALL_PARITY") != "1":
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "grid.jsonl").open("a") as file:
        file.writelines(json.dumps(asdict(finding)) + "\n" for finding in findings)
    latest = {}
    for line in (folder / "grid.jsonl").read_text().splitlines():
        finding = Finding(**json.loads(line))
        latest[finding.world, finding.model, finding.mesh, finding.dtype] = finding
    (folder / "grid.md").write_text(summary(list(latest.values())))


def summary(findings: list[Finding]) -> str:
    """Format the worst differences by dtype, model and world size, and every rejected mesh with its reason."""
    lines = ["# The grid", ""]
    for dtype in ("float64", "float32"):
        completed = [each for each in findings if each.dtype == dtype and not each.rejected]
        lines += _worst(completed, dtype)
        lines += ["| model | processes | meshes | worst loss | worst norm | worst gradient | wrong |", "|---" * 7 + "|"]
        for key in dict.fromkeys((each.model, each.world) for each in sorted(completed, key=lambda each: each.world)):
            of_key = [each for each in completed if (each.model, each.world) == key]
            figures = [max(getattr(each, name) for each in of_key) for name in ("loss", "norm", "gradient")]
            cells = [f"{figure:.1e}" for figure in figures[: 3 if dtype == "float64" else 2]] + ["-"]
            wrong = sum(len(each.problems) for each in of_key)
            lines.append(f"| {key[0]} | {key[1]} | {len(of_key)} | {' | '.join(cells[:3])} | {wrong} |")
        lines.append("")
    reasons: dict[str, list[str]] = {}
    for each in findings:
        for text in each.rejected:
            reasons.setdefault(text, []).append(f"{each.model} {each.mesh}")
    lines += [
        "## Rejected",
        "",
        *(f"- {text} ({len(names)}: {', '.join(names)})" for text, names in reasons.items()),
        "",
    ]
    wrong_cells = [text for each in findings for text in each.problems]
    return "\n".join([*lines, "## Wrong", "", *(f"- {text}" for text in wrong_cells or ["nothing"]), ""])


def _worst(completed: list[Finding], dtype: str) -> list[str]:
    if not completed:
        return []
    lines = [f"## {dtype}: {len(completed)} meshes", ""]
    for figure in ("loss", "norm", "gradient") if dtype == "float64" else ("loss", "norm"):
        worst = max(completed, key=lambda each: getattr(each, figure))
        where = f"{worst.model} on {worst.mesh} of {worst.world}"
        of = f", {worst.worst_gradient}" if figure == "gradient" else ""
        lines.append(f"- worst {figure}: {getattr(worst, figure):.1e} ({where}{of})")
    return [*lines, ""]
