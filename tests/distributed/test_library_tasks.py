"""Tasks of lm-eval's own library, with local data, on meshes against lm-eval's `simple_evaluate` with HFLM."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed; make install-dev installs it")
import lm_eval
from lm_eval.tasks import TaskManager

from components import training
from components.config.schema.model import DType, LossMethod
from components.models.tokenizer import byte_tokenizer
from tests.distributed.test_tasks import TOLERANCE, Recorder, config, folder, hflm, prepared
from tests.harness import run_ranks
from tests.lm_eval_tasks import LIBRARY, write_library_tasks

__all__ = ["folder"]  # the fixture: a model

EVERYTHING = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
TASKS = [f"local_{name}" for name in (LIBRARY if EVERYTHING else ["hellaswag", "lambada_openai", "gsm8k"])]
MESHES: dict[int, list[dict[str, Any]]] = {2: [{"dp_shard": 2}]}
if EVERYTHING:
    MESHES = {1: [{"strategy": "single"}], 2: [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}]}


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of lm-eval's results as Meshbook names them."""
    found = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if comma and "_stderr" not in metric:
                found[f"{task}/{metric}" + ("" if chosen == "none" else f"/{chosen}")] = value
    return found


@pytest.mark.parametrize("dtype", [DType.float64, DType.float32] if EVERYTHING else [DType.float64])
@pytest.mark.parametrize("world", MESHES)
def test_scores_of_library_tasks_equal_those_of_hflm(world: int, dtype: DType, folder: Path, tmp_path: Path) -> None:
    path = str(write_library_tasks(tmp_path / "library"))

    def reference(rank: int) -> dict[str, float]:
        manager = TaskManager(include_path=path, include_defaults=False)
        lm = hflm(folder, dtype)
        return scores_of(lm_eval.simple_evaluate(lm, tasks=TASKS, task_manager=manager, bootstrap_iters=0))

    def body(rank: int) -> list[dict[str, float]]:
        tokenizer, found = byte_tokenizer(), []
        plain = config(folder, dtype, {}, LossMethod.chunked).evaluation
        tasks = training.load_tasks(replace(plain, tasks=TASKS, task_path=path), tokenizer)
        for axes in MESHES[world]:
            cfg = config(folder, dtype, axes, LossMethod.chunked)
            run = Recorder(cfg)
            tasks.evaluate(prepared(cfg, run), run)
            found.append(dict(run.scores.metrics))
        return found

    (expected,) = run_ranks(1, reference)
    assert {key.partition("/")[0] for key in expected} == set(TASKS)
    for of_rank in run_ranks(world, body, timeout=400):
        for axes, scores in zip(MESHES[world], of_rank, strict=True):
            assert scores == pytest.approx(expected, rel=TOLERANCE[dtype]), axes
