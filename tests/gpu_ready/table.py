"""The tables of docs/gpu_counts.md, and their excerpt in RESULTS.md.

MESHBOOK_ALL_PARITY=1 python -m pytest tests/gpu_ready/test_matrix.py   # counts now, for outputs/gpu_ready
python -m tests.gpu_ready.roofline                                      # predicted speeds: speeds.json
python -m tests.gpu_ready.table                                         # counts.json, and the pages from all three

before.json has the counts of commit 0a6a30f, the code before it was prepared for GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.gpu_ready.matrix import PAIRS, planned_memory

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "outputs" / "gpu_ready" / "counts.jsonl"
"""Rows of the last runs of test_matrix.py."""
COUNTS, BEFORE, SPEEDS = (Path(__file__).with_name(f"{name}.json") for name in ("counts", "before", "speeds"))
"""Recorded counts now and before, and predicted speeds."""
PAGE, RESULTS = ROOT / "docs" / "gpu_counts.md", ROOT / "RESULTS.md"
BEGIN, END = "<!-- Written by python -m tests.gpu_ready.table -->\n", "<!-- End of what it writes -->\n"
LIMITS = {"bfloat16, packed": 90, "LoRA": 130, "QLoRA": 150}
"""Largest number of launches of a layer for a micro-batch on one device, packed rows, without compilation."""
TARGETS = {("1B full", "H200"): 60_000, ("8B LoRA", "H200"): 16_500}
"""Smallest predicted tokens per second."""
NOTED = 47_600
"""Tokens per second that were predicted for 1B on an H200 with the constants of roofline.py, before any change."""
NOT_COUNTED = "not counted"
Key = tuple[str, str]
"""Lever and layout."""


def recorded(file: Path) -> dict[Key, dict[str, Any]]:
    """Return recorded counts by lever and layout; empty if there are none."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return {(row["lever"], row["layout"]): row for row in rows}


def write_rows(file: Path, rows: dict[Key, dict[str, Any]]) -> None:
    """Record counts in the order of PAIRS."""
    ordered = [rows[pair] for pair in PAIRS if pair in rows]
    file.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in ordered) + "\n]\n")


def speeds() -> dict[Key, dict[str, float]]:
    """Return the predicted tokens per second by work and device: of each column of speeds.json."""
    return {
        (row["work"], row["device"]): {
            column: 1e3 * row["tokens"] / sum(terms.values()) for column, terms in row["milliseconds"].items()
        }
        for row in json.loads(SPEEDS.read_text())
    }


def page() -> str:
    """Return docs/gpu_counts.md."""
    now, before = recorded(COUNTS), recorded(BEFORE)
    levers = dict.fromkeys(lever for lever, _ in now)
    parts = [INTRODUCTION, _limits(now, before)]
    for lever in levers:
        keys = [key for key in now if key[0] == lever]
        parts += [f"## {lever[:1].upper()}{lever[1:]}\n", _table(HEADER, [_row(key, now, before) for key in keys])]
    parts += ["## Predicted speed\n", SPEED_TEXT, _speed_table(), _calibration(), _term_table()]
    return "\n".join(parts)


def excerpt() -> str:
    """Return the part of RESULTS.md: limits and predicted speeds."""
    limits = _limits(recorded(COUNTS), recorded(BEFORE))
    return "\n".join([limits, EXCERPT_TEXT, SPEEDS_TEXT, _speed_table(), _calibration()])


def results() -> str:
    """Return RESULTS.md with the current excerpt."""
    start, _, rest = RESULTS.read_text().partition(BEGIN)
    _, _, end = rest.partition(END)
    return start + BEGIN + "\n" + excerpt() + "\n" + END + end


INTRODUCTION = f"""# Counted for GPUs, without one

{BEGIN}
No GPU was used. The step of the recipes runs on fake CUDA tensors, which have shapes but no values. Every operator that
would launch a kernel is counted, with the bytes of the tensors that it reads and writes. `before → now` compares commit
0a6a30f, which was not prepared for GPUs, with the current code; a single figure did not change. For each lever and
layout:

- **launches** and **GB**: of one decoder layer of the size of Llama 3.2 1B for a micro-batch of two rows of 3,072
  tokens: forward, backward and a share of the optimizer step, without compilation;
- **collectives** of that layer for that micro-batch; a step has two micro-batches;
- **host syncs** of a step: places where the host waits for the device. Under ep, the dispatch of tokens to experts
  waits once more per layer, before and now;
- **peak memory** of a step with two layers per rank, by the planner's formulas and as the sum of all live storages: of
  the first rank, and under pp of the last one too.

*{NOT_COUNTED}*: commit 0a6a30f does not have the lever, or was not counted. *failed*: its step ended with an error.
`tests/gpu_ready/table.py` lists the commands that repeat the counts; `make parity PART=gpu_ready` fails if one rises.

The counts are of layers that are not compiled, with `model.fused=all`. A run on a GPU with default settings compiles
its layers instead (`model.compile=auto`), except under the settings that its banner names; the last section has its
speed.
"""
HEADER = ["layout", "launches", "GB", "collectives", "host syncs", "peak memory, planned / counted"]
SPEED_TEXT = """Predictions, **not measured**: every operator takes the longest of its bytes at 3.8 (H200) or 2.6 TB/s
(H100), its FLOPs at 700 or 650 TFLOP/s (attention 350 forward and 300 backward, FlashAttention 3 600 and 500), and
2 microseconds. Overlap, clocks and the allocator are left out. Packed rows of 4,096 tokens on one GPU, 8 rows a step in
two micro-batches (1B) or 2 rows (8B); of compiled layers and loss, Inductor's own count of the bytes of its fused
kernels is taken. The columns *now* are of weights in bfloat16 under `parallelism=single`.

*By auto* is what a run with default settings does at these sizes: layers and loss compiled, nothing recomputed
(`none` fits), matmuls in bfloat16, trained weights and optimizer state in float32, frozen weights in bfloat16, and
`parallelism=fsdp2` with one rank, which casts and copies the weights of each layer twice per micro-batch. `make gpu`
measures these and compares them with this column.
"""
CALIBRATION_TEXT = """The assumed rates were fixed before any change, when 47,600 tokens/s were predicted for 1B on an
H200. For the same commit this script predicts {noted:,.0f} if it counts the backward of SiLU as the six operators that
torch dispatches for fake tensors. A GPU runs one kernel, so the column *before* is higher. FlashAttention 3 runs where
it is installed.
"""
EXCERPT_TEXT = """Counted on fake CUDA tensors, without a GPU. `docs/gpu_counts.md` has other levers and layouts, with
bytes, collectives, host syncs and peak memory.
"""
SPEEDS_TEXT = "Predicted tokens/s of one GPU, **not measured**; the assumptions are in `docs/gpu_counts.md`:\n"


def _limits(now: dict[Key, dict[str, Any]], before: dict[Key, dict[str, Any]]) -> str:
    """Return the table of the limits of launches."""
    rows = []
    for name, limit in LIMITS.items():
        key = (name, "single")
        rows.append([name, _launches(before.get(key)), _launches(now.get(key)), f"{limit}"])
    header = ["kernels of a layer for a micro-batch, packed rows, one GPU, not compiled", "before", "now", "limit"]
    return _table(header, rows)


def _row(key: Key, now: dict[Key, dict[str, Any]], before: dict[Key, dict[str, Any]]) -> list[str]:
    columns = [
        [cell(row) for row in (before.get(key), now[key])] for cell in (_launches, _gigabytes, _collectives, _syncs)
    ]
    return [key[1], *(" → ".join(dict.fromkeys(pair)) for pair in columns), _peaks(key, now[key])]


def _peaks(key: Key, row: dict[str, Any]) -> str:
    cells = []
    for rank, counted in row["peaks"]:
        planned = planned_memory(*key, rank).peak
        cells.append(f"{planned / 1e9:.2f} / {counted / 1e9:.2f} GB ({planned / counted - 1:+.1%})")
    return "; ".join(cells)


def _launches(row: dict[str, Any] | None) -> str:
    return _cell(row, lambda found: f"{found['launches']:g}")


def _gigabytes(row: dict[str, Any] | None) -> str:
    return _cell(row, lambda found: f"{found['GB']:.2f}")


def _collectives(row: dict[str, Any] | None) -> str:
    return _cell(
        row, lambda found: ", ".join(f"{count:g} {kind}" for kind, count in found["collectives"].items()) or "none"
    )


def _syncs(row: dict[str, Any] | None) -> str:
    return _cell(row, lambda found: str(sum(found["waits"].values())))


def _cell(row: dict[str, Any] | None, text: Any) -> str:
    if row is None:
        return NOT_COUNTED
    return "failed" if "error" in row else text(row)


def _speed_table() -> str:
    found = speeds()
    columns = [
        "before", "now, not compiled", "now, compiled", "now, compiled, FlashAttention 3", "by auto",
        "by auto, FlashAttention 3",
    ]  # fmt: skip
    rows = [
        [
            f"{work} on {device}",
            *(f"{found[work, device][each]:,.0f}" for each in columns),
            f"{target:,}" if target else "",
        ]
        for work, device in found
        for target in [TARGETS.get((work, device))]
    ]
    return _table(["tokens/s, predicted", *columns, "target"], rows)


def _calibration() -> str:
    return CALIBRATION_TEXT.format(noted=speeds()["1B full", "H200"]["before, as dispatched"])


def _term_table() -> str:
    """Return the milliseconds of the H200."""
    rows = json.loads(SPEEDS.read_text())
    terms = list(dict.fromkeys(term for row in rows for column in row["milliseconds"].values() for term in column))
    cells = [
        [f"{row['work']}, {column}", *(f"{found.get(term, 0):.0f}" for term in terms)]
        for row in rows
        if row["device"] == "H200"
        for column, found in row["milliseconds"].items()
    ]
    return _table(["ms of a step on an H200, predicted", *terms], cells)


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def record_found() -> None:
    """Write the rows of the last runs of test_matrix.py to counts.json; without runs, change nothing."""
    if not FOUND.exists():
        return
    rows = recorded(COUNTS)
    for line in FOUND.read_text().splitlines():
        row = json.loads(line)
        if "launches" in row:
            rows[row["lever"], row["layout"]] = row
    write_rows(COUNTS, rows)


def main() -> None:
    """Write counts.json and the pages."""
    record_found()
    PAGE.write_text(page())
    RESULTS.write_text(results())


if __name__ == "__main__":
    main()
