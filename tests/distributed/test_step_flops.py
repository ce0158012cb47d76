"""The FLOPs of a step, in seconds at the peak of all devices, are the same on every mesh."""

from __future__ import annotations

import pytest
import torch

from components import distributed, models, training
from components.batch import Batch
from components.config.schema import AdamWConfig
from components.config.schema.parallelism import ParallelismConfig
from components.config.schema.run import LoggingConfig
from components.training.step_cost import model_flops
from tests.distributed.parity import build
from tests.harness import run_ranks

CPU = torch.device("cpu")
SEQ = 24


def test_flops_of_a_step_are_independent_of_the_mesh() -> None:
    """Rows that several ranks read are counted once; the peak is summed over all devices."""
    labels = torch.full((2, SEQ), 7)
    labels[1, 10:] = -100
    expected = model_flops(build("llama", torch.float32)).of([SEQ, 10]) / (2 * 2e12)

    def seconds(rank: int, axes: dict[str, int]) -> float:
        model = build("llama", torch.float32)
        models.use_causal_sdpa(model)
        config = ParallelismConfig(**axes)
        mesh = distributed.build_mesh(config, "cpu")
        flops = training.step_flops(model, LoggingConfig(peak_tflops=2.0), mesh, CPU, torch.float32)
        layout = distributed.parallelize(model, mesh, config, torch.float32)
        replica = distributed.wrap_replicas(model, mesh, config, layout)
        rows = slice(rank, rank + 1) if mesh.size("dp") == 2 else slice(0, 2)
        settings = training.StepSettings(device=CPU, mesh=mesh, flops=flops)
        batches = [Batch.from_labels(torch.full((1, SEQ), 7), labels[row : row + 1]) for row in (0, 1)[rows]]
        optimizer = training.build_optimizer(model, AdamWConfig())
        vector = training.train_step(training.Prepared(model, settings, replica), batches, optimizer)
        return vector["seconds_at_peak"].item()

    meshes = [{"dp_shard": 2}, {"dp_shard": 1, "cp": 2}, {"dp_shard": 1, "tp": 2}, {"pp": 2}]
    for found in run_ranks(2, lambda rank: [seconds(rank, axes) for axes in meshes]):
        assert found == pytest.approx([expected] * len(meshes), rel=1e-12)
