"""A run with ramps of batch size and length: resumed within them on another mesh, it trains the same curve."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.recipes.launching import TWO, Bench

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pretrain.py"
SHORT = (
    *("model=tiny", "data=text", "data.path=texts.jsonl", "training.global_batch_size=8", "training.seq_len=64"),
    *("training.micro_batch_size=1", "training.eval_every=0", "generation.samples=0", "training.max_steps=6"),
    *("training.log_every=1", "data.max_eval_samples=4"),
    "training.batch_size_ramp=[{until_step:1,global_batch_size:2},{until_step:4,global_batch_size:4}]",
    "training.seq_len_ramp=[{until_step:3,seq_len:16}]",
    *("checkpoint.every=2", "checkpoint.export=false", "logging.plot=false", "cluster.device=cpu"),
)


def lines_of(run: Path) -> list[dict[str, float]]:
    """Return the training lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


def test_run_resumed_within_the_ramp_on_another_mesh_equals_an_uninterrupted_one(bench: Bench) -> None:
    bench.recipe.write_text(RECIPE.read_text())
    rows = [{"text": f"text {number} " + "abcdefg " * (5 + number % 7)} for number in range(80)]
    (bench.folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    whole = bench.start(*SHORT, "parallelism=single", "run.dir=whole").wait()
    assert whole.status == 0, whole.errors
    assert "2 up to step 1, 4 up to step 4, rows of 16 tokens up to step 3" in " ".join(whole.output.split())
    bench.recipe.write_text(
        RECIPE.read_text().replace(
            "                run.save(step)\n", "                run.save(step)\n                raise SystemExit(9)\n"
        )
    )
    assert bench.start(*SHORT, "parallelism=single", "run.dir=again").wait().status == 9
    bench.recipe.write_text(RECIPE.read_text())
    again = bench.start(*SHORT, "parallelism=fsdp2", TWO, "run.dir=again").wait()
    assert again.status == 0, again.errors
    assert "resumed from" in again.output

    expected, found = lines_of(bench.folder / "whole"), lines_of(bench.folder / "again")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    tokens = [line["tokens"] for line in expected]
    steps = [later - earlier for earlier, later in pairwise([0, *tokens])]
    assert steps[0] < 0.7 * steps[1]
    assert steps[3] < 0.7 * steps[4]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-4)
