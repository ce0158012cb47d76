"""Megatron-FSDP (PyPI megatron-fsdp, formerly nvFSDP), installed by the optional extra `megatron`."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from components.config.errors import ConfigError

HAVE_NVFSDP = importlib.util.find_spec("megatron_fsdp") is not None
"""Whether megatron-fsdp is installed; checked without importing it."""

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class NvFsdpError(ConfigError, AssertionError):
    """Error of nvfsdp_strategy_parallelize; also an AssertionError, as in NeMo AutoModel if nvFSDP is absent."""


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: dict[str, RowwiseParallel | ColwiseParallel | SequenceParallel] | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = "data_parallel",
    cp_mesh_name: str = "context_parallel",
    tp_mesh_name: str = "tensor_parallel",
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Apply tensor parallelism and Megatron-FSDP; return (model, optimizer).

    Same signature as in NeMo AutoModel's parallelizer. With `nvfsdp_unit_modules=None` the model is a single unit.
    Raises NvFsdpError if the package is not installed, the sharding strategy is unknown, or tp has several ranks and
    `tp_shard_plan` is None.
    """
    if not HAVE_NVFSDP:
        raise NvFsdpError("megatron-fsdp is not installed; install the extra: pip install 'meshbook[megatron]'")
    if data_parallel_sharding_strategy not in SHARDING_STRATEGIES:
        raise NvFsdpError(
            f"data_parallel_sharding_strategy={data_parallel_sharding_strategy!r}: must be one of "
            + ", ".join(SHARDING_STRATEGIES)
        )
    names = device_mesh.mesh_dim_names or ()
    tp = tp_mesh_name in names and device_mesh[tp_mesh_name].size() > 1
    if tp:
        if tp_shard_plan is None:
            raise NvFsdpError(
                f"{tp_mesh_name} has {device_mesh[tp_mesh_name].size()} ranks and no plan; give a tp_shard_plan"
            )
        parallelize_module(model, device_mesh[tp_mesh_name], tp_shard_plan)  # type: ignore[arg-type]
    cp = cp_mesh_name in names and device_mesh[cp_mesh_name].size() > 1
    arguments: dict[str, Any] = {
        "module": model,
        "device_mesh": device_mesh,
        "dp_shard_dim": "dp_cp" if cp else dp_mesh_name,
        "tp_dim": tp_mesh_name if tp else None,
        "fsdp_unit_modules": nvfsdp_unit_modules or [f"{type(model).__module__}.{type(model).__qualname__}"],
        "zero_dp_strategy": data_parallel_sharding_strategy,
        "init_model_with_meta_device": init_nvfsdp_with_meta_device,
        "mixed_precision_policy": _precision(grad_reduce_in_fp32, preserve_fp32_weights),
        "overlap_grad_reduce": overlap_grad_reduce,
        "overlap_param_gather": overlap_param_gather,
        "sync_model_each_microbatch": False,
        "report_nan_in_param_grad": check_for_nan_in_grad,
        "average_in_collective": average_in_collective,
        "disable_bucketing": disable_bucketing,
        "calculate_per_token_loss": calculate_per_token_loss,
        "keep_fp8_transpose_cache": keep_fp8_transpose_cache_when_using_custom_fsdp,
        "nccl_ub": nccl_ub,
        "fsdp_double_buffer": fsdp_double_buffer,
    }
    return call_megatron_fsdp(arguments, optimizer)


def call_megatron_fsdp(
    arguments: dict[str, Any], optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Call megatron_fsdp, which shards the optimizer together with the model if one is given."""
    import megatron_fsdp

    if optimizer is None:
        return megatron_fsdp.fully_shard_model(**arguments), None
    return megatron_fsdp.fully_shard(**arguments, optimizer=optimizer)


def _precision(grad_reduce_in_fp32: bool, preserve_fp32_weights: bool) -> Any:
    from megatron_fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if preserve_fp32_weights else None,
        main_grads_dtype=torch.float32 if grad_reduce_in_fp32 else None,
        grad_comm_dtype=torch.float32 if grad_reduce_in_fp32 else None,
    )
