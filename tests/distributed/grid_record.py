"""What the grid showed, for people: outputs/parity/grid.md, from the findings of every run so far."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from tests.distributed.grid import Finding

FOLDER = Path(__file__).resolve().parents[2] / "outputs" / "parity"


def record(findings: list[Finding], folder: Path = FOLDER) -> None:
    """Add findings to grid.jsonl and write grid.md anew, under `make parity`. A cell's last finding counts."""
    if os.environ.get("MESHBOOK_ALL_PARITY") != "1":
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "grid.jsonl").open("a") as file:
        file.writelines(json.dumps(asdict(finding)) + "\n" for finding in findings)
    everything = {}
    for line in (folder / "grid.jsonl").read_text().splitlines():
        finding = Finding(**json.loads(line))
        everything[finding.world, finding.model, finding.mesh, finding.dtype] = finding
    (folder / "grid.md").write_text(summary(list(everything.values())))


def summary(findings: list[Finding]) -> str:
    """The worst figures by dtype, number of processes and model, and every refused mesh with its reason."""
    lines = ["# The grid", ""]
    for dtype in ("float64", "float32"):
        ran = [each for each in findings if each.dtype == dtype and not each.refused]
        lines += _worst(ran, dtype)
        lines += ["| model | processes | meshes | worst loss | worst norm | worst gradient | wrong |", "|---" * 7 + "|"]
        for key in dict.fromkeys((each.model, each.world) for each in sorted(ran, key=lambda each: each.world)):
            of_key = [each for each in ran if (each.model, each.world) == key]
            figures = [max(getattr(each, name) for each in of_key) for name in ("loss", "norm", "gradient")]
            told = [f"{figure:.1e}" for figure in figures[: 3 if dtype == "float64" else 2]] + ["-"]
            wrong = sum(len(each.problems) for each in of_key)
            lines.append(f"| {key[0]} | {key[1]} | {len(of_key)} | {' | '.join(told[:3])} | {wrong} |")
        lines.append("")
    reasons: dict[str, list[str]] = {}
    for each in findings:
        for text in each.refused:
            reasons.setdefault(text, []).append(f"{each.model} {each.mesh}")
    lines += ["## Refused", "", *(f"- {text} ({len(who)}: {', '.join(who)})" for text, who in reasons.items()), ""]
    wrong_cells = [text for each in findings for text in each.problems]
    return "\n".join([*lines, "## Wrong", "", *(f"- {text}" for text in wrong_cells or ["nothing"]), ""])


def _worst(ran: list[Finding], dtype: str) -> list[str]:
    if not ran:
        return []
    lines = [f"## {dtype}: {len(ran)} meshes", ""]
    for figure in ("loss", "norm", "gradient") if dtype == "float64" else ("loss", "norm"):
        worst = max(ran, key=lambda each: getattr(each, figure))
        where = f"{worst.model} on {worst.mesh} of {worst.world}"
        of = f", {worst.worst_gradient}" if figure == "gradient" else ""
        lines.append(f"- worst {figure}: {getattr(worst, figure):.1e} ({where}{of})")
    return [*lines, ""]
