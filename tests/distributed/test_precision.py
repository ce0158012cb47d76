"""Dtypes under pure and mixed bfloat16; gradients are reduced in float32 in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components import distributed, models, training
from components.batch import Batch
from components.config.schema import AdamWConfig, ModelConfig, ParallelismConfig
from components.config.schema.model import DType
from tests.distributed.parity import build
from tests.distributed.test_parity import DDP, FSDP2
from tests.harness import run_ranks

CPU = torch.device("cpu")


def test_compute_dtype_describes_the_precision_mode() -> None:
    def description(stored: DType, compute: DType) -> str:
        return training.compute_dtype(ModelConfig(path="x", dtype=stored, compute_dtype=compute), CPU)[1]

    assert description(DType.bfloat16, DType.bfloat16).startswith("pure bfloat16: weights, gradients, optimizer state")
    mixed = description(DType.float32, DType.bfloat16)
    assert mixed == "mixed: computed in bfloat16; weights, gradients and optimizer state in float32"
    assert description(DType.float32, DType.float32) == "computed in float32"
    assert description(DType.float64, DType.auto) == "computed in float64, as stored"


class _RecordReductions(TorchDispatchMode):
    """Record the dtypes of large tensors that are reduced over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("reduce_scatter", "allreduce", "all_reduce")):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.types |= {str(tensor.dtype)[6:] for tensor in tensors if tensor.numel() > 1000}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("axes", [FSDP2, DDP], ids=["fsdp2", "ddp"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["pure", "mixed"])
def test_state_keeps_storage_dtype_and_gradients_are_reduced_in_float32(
    axes: dict[str, Any], stored: torch.dtype
) -> None:
    tokens = torch.randint(3, 97, (1, 16), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_labels(tokens, tokens)

    def on_rank(rank: int) -> tuple[set[str], set[str], list[float]]:
        model: Any = build("llama", stored)
        models.use_causal_sdpa(model)
        config = ParallelismConfig(**axes)
        mesh = distributed.build_mesh(config, "cpu")
        layout = distributed.parallelize(model, mesh, config, torch.bfloat16)
        replica = distributed.wrap_replicas(model, mesh, config, layout)
        model_config = ModelConfig(path="x", dtype=DType(str(stored)[6:]), compute_dtype=DType.bfloat16)
        autocast = training.autocast_dtype(config, model_config, torch.bfloat16)
        settings = training.StepSettings(device=CPU, mesh=mesh, autocast=autocast)
        optimizer = training.build_optimizer(model, AdamWConfig(lr=1e-2))
        with _RecordReductions() as reduced:
            losses = [
                training.train_step(training.Prepared(model, settings, replica), [batch] * 2, optimizer)["loss"].item()
                for _ in range(4)
            ]
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        return {str(each.dtype)[6:] for each in [*model.parameters(), *moments]}, reduced.types, losses

    for state_dtypes, reduced, losses in run_ranks(2, on_rank):
        assert state_dtypes == {str(stored)[6:]}
        assert reduced == {"float32"}
        assert losses[-1] < losses[0]
