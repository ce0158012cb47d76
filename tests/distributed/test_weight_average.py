"""The moving average on meshes: equal to one process, saved, resumed on another mesh, and invisible to training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components import training
from components.checkpoint import StoredWeights, find_checkpoint, load_checkpoint, load_model_weights
from components.checkpoint.save import take_snapshot, write_snapshot
from components.config.schema.run import CheckpointConfig
from components.config.schema.training import EvalWeights
from components.training.prepared import WeightAverage
from tests.distributed.parity import OPTIMIZER
from tests.distributed.tiny_runs import MAX_STEPS, TinyRun, build, cell_named, start
from tests.harness import run_ranks

DECAY, BEFORE, AFTER = 0.8, 2, 2


def train(run: TinyRun, prepared: training.Prepared, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        training.set_learning_rate(run.optimizer, OPTIMIZER, run.state.step, MAX_STEPS)
        losses.append(training.train_step(prepared, next(run.batches), run.optimizer)["loss"].item())
        run.state.step += 1
    return losses


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the full tensors of all ranks, gathered by torch."""
    local = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}
    if not dist.is_initialized():
        return local
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return {name: value for held in gathered for name, value in held.items()}


def test_average_on_meshes_equals_that_of_one_process_and_is_resumed(tmp_path: Path) -> None:
    built = build("llama")

    def begin(mesh: str, world: int) -> tuple[TinyRun, training.Prepared]:
        run = start(cell_named("llama", mesh, world), built)
        average = WeightAverage(run.model, DECAY)
        return run, training.Prepared(run.model, run.settings, run.called, average=average)

    def alone(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Return the losses, and the averages in float64 from the weights after each step."""
        run, prepared = begin("fsdp2", 1)
        prepared = replace(prepared, average=None)
        losses, total, expected = [], 0.0, {}
        for _ in range(BEFORE + AFTER):
            losses += train(run, prepared, 1)
            total = DECAY * total + 1
            for name, each in full(dict(run.model.named_parameters())).items():
                expected[name] = DECAY * expected.get(name, 0) + each.double()
        return losses, {name: each / total for name, each in expected.items()}

    ((losses, expected),) = run_ranks(1, alone)

    def sharded(rank: int) -> None:
        run, prepared = begin("dp_shard2", 2)
        rows = list(run.batches.at(7))
        found = []
        for _ in range(BEFORE):
            found += train(run, prepared, 1)
            training.evaluate(prepared, rows)  # must not change the next step
        assert found == pytest.approx(losses[:BEFORE], rel=1e-5)
        snapshot = take_snapshot(BEFORE, run.model, run.optimizer, run.extra(), average=prepared.average.tensors)
        write_snapshot(tmp_path, snapshot, CheckpointConfig())
        saved = full(prepared.average.tensors)

        path = find_checkpoint(tmp_path, "auto")
        again, resumed = begin("pp2", 2)
        train(again, resumed, 1)  # loading must replace everything
        again.take(load_checkpoint(path, again.model, again.optimizer, resumed.average.tensors))
        loaded = full(resumed.average.tensors)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], each) for name, each in saved.items())
        assert train(again, resumed, AFTER) == pytest.approx(losses[BEFORE:], rel=1e-5)
        averages = full(resumed.average.tensors)
        assert averages.pop("average_updates") == BEFORE + AFTER
        assert len(averages) == len(expected)
        for name, each in averages.items():
            torch.testing.assert_close(each.double(), expected[name.removeprefix("average/")], rtol=1e-4, atol=1e-6)

        evaluated, _ = begin("dp_shard2", 2)  # recipes/evaluate.py evaluation.average=true
        load_model_weights(path, evaluated.model, averaged=True)
        for name, each in full(dict(evaluated.model.named_parameters())).items():
            assert torch.equal(each, saved[f"average/{name}"])
            stored = StoredWeights(path, averaged=True).read(name, tuple(slice(0, size) for size in each.shape))
            assert torch.equal(stored, each)

    run_ranks(2, sharded)


def test_tied_head_of_a_pipeline_follows_the_evaluated_weights() -> None:
    built = build("llama_tied")

    def measure(mesh: str, world: int) -> list[tuple[float, float, float]]:
        """Return the training loss, and the held-out losses of the averaged and trained weights, after each step."""
        run = start(cell_named("llama_tied", mesh, world), built)
        average = WeightAverage(run.model, DECAY, EvalWeights.both)
        prepared = training.Prepared(run.model, run.settings, run.called, average=average)
        rows, found = list(run.batches.at(7)), []
        for _ in range(3):
            (loss,) = train(run, prepared, 1)
            measured = training.evaluate(prepared, rows)
            found.append((loss, measured.loss, measured.metrics["loss_trained"]))
        return found

    (expected,) = run_ranks(1, lambda rank: measure("fsdp2", 1))
    for found in run_ranks(2, lambda rank: measure("pp2", 2)):
        assert [each for step in found for each in step] == pytest.approx(sum(expected, ()), rel=1e-5)
