"""dpo, distill and classify: preempted runs resume on another mesh with the same curve, and sweeps choose a point."""

from __future__ import annotations

import csv
import json
import signal

import pytest

from tests.recipes.launching import TWO, Bench, until
from tests.recipes.small_jobs import job, lines_of, write_data
from tests.suites import TORTURE

STEPS = 20


def prepared(bench: Bench, name: str) -> tuple[str, ...]:
    """Copy the recipe of a job and write its data; return the job's arguments."""
    recipe, arguments = job(name)
    bench.recipe.write_text(recipe.read_text())
    write_data(bench.folder)
    return arguments


@pytest.mark.parametrize("name", ["dpo", "distill", "classify"] if TORTURE else ["distill"])
def test_preempted_run_resumes_on_another_mesh_with_the_same_curve(bench: Bench, name: str) -> None:
    command = (
        *prepared(bench, name),
        f"training.max_steps={STEPS}",
        f"training.eval_every={STEPS}",
        "optimizer.lr=1e-3",
    )
    bench.complete(*command, "run.dir=undisturbed", "parallelism=single")

    started = bench.start(*command, "run.dir=run", "parallelism=fsdp2", TWO)
    metrics = bench.folder / "run" / "metrics.jsonl"
    until(lambda: started.process.poll() is not None or (metrics.exists() and '"loss"' in metrics.read_text()))
    started.signal(signal.SIGUSR2)
    stopped = started.wait()
    assert stopped.status == 0, stopped.errors
    result = json.loads((bench.folder / "run" / "result.json").read_text())
    assert result["status"] == "preempted"
    assert 1 <= result["steps"] < STEPS

    resumed = bench.complete(*command, "run.dir=run", "parallelism=tp2", TWO)
    assert f"/step_{result['steps']}" in resumed.output.partition("resumed from ")[2].partition("\n")[0]
    curves = [lines_of(bench.folder / name) for name in ("run", "undisturbed")]
    assert len(curves[0]) == STEPS
    last = [lines_of(bench.folder / name, "eval_loss")[-1:] for name in ("run", "undisturbed")]
    for line, expected in zip(curves[0] + last[0], curves[1] + last[1], strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "key", "values", "judged_by"),
    [*([("distill", "optimizer.lr", "1e-4,1e-2", "eval_loss")] if TORTURE else []),
     ("reward", "objective.center_weight", "0,0.5", "eval_accuracy")],
)  # fmt: skip
def test_sweep_is_judged_by_held_out_results(bench: Bench, name: str, key: str, values: str, judged_by: str) -> None:
    """Losses of two objectives are not comparable: reward models are judged by their accuracy on held-out pairs."""
    command = (*prepared(bench, name), "parallelism=single", "training.max_steps=3", "checkpoint.last=false")
    done = bench.complete("-m", f"{key}={values}", *command, "run.dir=sweep")
    assert f"best: by held-out {judged_by.removeprefix('eval_')}" in done.output
    with (bench.folder / "sweep" / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {float(row[key]) for row in rows} == set(map(float, values.split(",")))
    found = [lines_of(bench.folder / "sweep" / row["run"], judged_by)[-1][judged_by] for row in rows]
    assert [float(row[judged_by]) for row in rows] == found
    assert found == sorted(found, reverse=judged_by == "eval_accuracy")
    assert [row["best"] for row in rows] == ["True", "False"]
