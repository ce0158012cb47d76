"""Minimal re-creations of the bugs of the published parallelizer (NeMo AutoModel), written from its description."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


def apply_fsdp(module: nn.Module, mesh: DeviceMesh, mp_policy: Any, offload_policy: Any = None) -> None:
    """Shard every child of a ModuleList, ignore ModuleDict, and keep the last layer of EVERY list unsharded."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            for index, item in enumerate(child):
                fully_shard(item, mesh=mesh, reshard_after_forward=index < len(child) - 1)
        else:
            apply_fsdp(child, mesh, mp_policy)


def import_class_from_path(name: str) -> Any:
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


def import_classes_from_paths(paths: list[str]) -> list[Any]:
    found = []
    for path in paths:
        try:
            found.append(import_class_from_path(path))
        except Exception as error:
            print(f"Warning: {error}")
    return found


@functools.lru_cache
def translate(style: str) -> Any:
    """Return one shared object per style name; the names of transformers 5 are missing."""
    if style == "colwise":
        return ColwiseParallel()
    if style == "rowwise":
        return RowwiseParallel()
    if style == "colwise_rep":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise_rep":
        return RowwiseParallel(input_layouts=Replicate())
    if style == "sequence_parallel":
        return SequenceParallel()
    raise ValueError(f"Unknown parallel style: {style}")


def hf_plan(model: nn.Module) -> dict[str, Any]:
    return {path: translate(style) for path, style in model.tp_plan.items()}


def parallelize_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard linear layers only: norms of sharded heads and tied embeddings are not handled."""
    linear_styles = ("colwise", "rowwise")
    plan = {path: translate(style) for path, style in model.tp_plan.items() if style in linear_styles}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def fsdp2(model: nn.Module, mesh: DeviceMesh, **_: Any) -> nn.Module:
    """Read Llama's attributes before checking the model, and cast every block's output to float32."""
    layers = model.model.layers
    tp = mesh["tensor_parallel"].size() if "tensor_parallel" in mesh.mesh_dim_names else 1
    if model.config.num_key_value_heads % tp or model.config.num_attention_heads % tp:
        raise AssertionError("heads must be divisible by the TP size")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy)
    return model


class unshard:
    """Context manager that unshards, although the first forward reshards."""

    def __init__(self, model: nn.Module) -> None:
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def __enter__(self) -> None:
        for unit in self.units:
            unit.unshard()

    def __exit__(self, *_: Any) -> None:
        for unit in self.units:
            unit.reshard()


def gradient_norm(parameters: Any) -> torch.Tensor:
    """Sum the local squares over all ranks, which counts replicated gradients once per rank."""
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        grad = parameter.grad
        squares += (grad.to_local() if hasattr(grad, "to_local") else grad).double().square().sum()
    torch.distributed.all_reduce(squares)
    return squares.sqrt()
