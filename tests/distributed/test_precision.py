"""Dtypes under pure and mixed bfloat16; gradients are reduced in float32 in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components import distributed, models, training
from components.batch import Batch
from components.config.schema import AdamWConfig, ModelConfig, ParallelismConfig
from components.config.schema.model import DType, WeightInit
from components.config.schema.parallelism import Strategy
from tests.distributed.parity import SMALL, build
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


def test_state_keeps_storage_dtype_and_gradients_are_reduced_in_float32() -> None:
    tokens = torch.randint(3, 97, (1, 16), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_labels(tokens, tokens)

    def trained(axes: dict[str, Any], stored: torch.dtype) -> tuple[set[str], set[str], list[float]]:
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

    cases = [(axes, stored) for axes in (FSDP2, DDP) for stored in (torch.bfloat16, torch.float32)]
    for results in run_ranks(2, lambda _: [trained(*case) for case in cases]):
        for (_, stored), (state_dtypes, reduced, losses) in zip(cases, results, strict=True):
            assert state_dtypes == {str(stored)[6:]}
            assert reduced == {"float32"}
            assert losses[-1] < losses[0]


ROUTERS = {**SMALL, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0,
           "moe_intermediate_size": 24, "head_dim": 12}  # fmt: skip


@pytest.mark.skipif("_fsdp_param_groups" not in vars(FSDPState()), reason="this torch has one group per unit")
@pytest.mark.parametrize("stored", [DType.bfloat16, DType.float32])
def test_fsdp2_does_not_cast_parameters_that_transformers_keeps_in_float32(stored: DType) -> None:
    """The router of Ernie, beside parameters in bfloat16: the loss curve is that of one process."""
    tokens = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    config = ModelConfig(
        init=WeightInit.random, tokenizer="bytes", config={**ROUTERS, "vocab_size": 272}, dtype=stored,
        compute_dtype=DType.bfloat16,
    )  # fmt: skip

    def curve(axes: dict[str, Any]) -> tuple[list[float], set[str]]:
        model: Any = models.build_on_meta(config)
        anatomy = models.read_anatomy(model)
        parallelism = ParallelismConfig(**axes)
        mesh = distributed.build_mesh(parallelism, "cpu")
        distributed.parallelize(model, mesh, parallelism, torch.bfloat16, anatomy)
        models.materialize(model, CPU)
        models.fill_weights(model, config, 0)
        seen: set[str] = set()
        for router in (layer.mlp.gate for layer in model.model.layers):
            router.register_forward_pre_hook(lambda module, _: seen.add(str(module.weight.dtype)[6:]))
        settings = training.StepSettings(
            device=CPU, mesh=mesh, autocast=training.autocast_dtype(parallelism, config, torch.bfloat16)
        )
        optimizer = training.build_optimizer(model, AdamWConfig(lr=1e-2))
        batches = [Batch.from_labels(tokens, tokens)] * 2
        prepared = training.Prepared(model, settings)
        return [training.train_step(prepared, batches, optimizer)["loss"].item() for _ in range(3)], seen

    (expected, kept), *_ = run_ranks(1, lambda _: curve({"strategy": Strategy.single, "dp_shard": 1}))
    assert kept == {"float32"}
    for losses, seen in run_ranks(2, lambda _: curve(FSDP2)):
        assert seen == kept
        assert losses == pytest.approx(expected, rel=1e-6 if stored == DType.bfloat16 else 2e-3)
