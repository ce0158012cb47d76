"""Every function of the reference APIs exists in its module with the documented signature."""

from __future__ import annotations

import importlib
import inspect
from contextlib import ContextDecorator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import components.distributed as package

INIT = "components.distributed.init"
UTILS = "components.distributed.utils"
MESH = "components.distributed.mesh"
PARALLELIZER = "components.distributed.parallelizer"

FUNCTIONS = [
    # NeMo AutoModel, init_utils
    (INIT, "destroy_global_state", ""),
    (INIT, "get_local_rank_preinit", ""),
    (INIT, "get_local_world_size_preinit", ""),
    (INIT, "get_rank_safe", ""),
    (INIT, "get_world_size_safe", ""),
    (INIT, "initialize_distributed", "backend, timeout_minutes=1"),
    # NeMo AutoModel, utils
    (UTILS, "_barrier_with_timeout", "timeout, group=None"),
    (UTILS, "_create_gloo_group", ""),
    (UTILS, "barrier_and_log", "string"),
    (UTILS, "dp_eval_sample_shard", "distributed_config, dp_rank, dp_size"),
    (UTILS, "get_sync_ctx", "model, is_optim_step, defer_fsdp_grad_sync"),
    (UTILS, "reduce_loss", "loss_store, total_num_tokens, per_token_loss=True, dp_group=None, *, check_finite=True"),
    # OLMo-core, distributed.utils
    (UTILS, "init_distributed", "backend='nccl', timeout=timedelta(seconds=1800), shared_filesytem=True, **kwargs"),
    (UTILS, "validate_env_vars", ""),
    (UTILS, "is_distributed", ""),
    (UTILS, "barrier", "group=None"),
    (UTILS, "get_rank", "group=None"),
    (UTILS, "get_global_rank", "group_rank, group=None"),
    (UTILS, "get_local_rank", ""),
    (UTILS, "get_fs_local_rank", "group=None"),
    (UTILS, "get_world_size", "group=None"),
    (UTILS, "get_local_world_size", ""),
    (UTILS, "get_num_nodes", ""),
    (UTILS, "synchronize_value", "value, device, src=0, group=None"),
    (UTILS, "synchronize_flag", "flag, device, group=None"),
    (UTILS, "all_reduce_value", "value, device, op=ReduceOp.SUM, group=None"),
    (UTILS, "broadcast_object", "obj, src=0, group=None"),
    (UTILS, "all_gather", "tensor, group=None"),
    (UTILS, "all_gather_object", "obj, group=None"),
    (UTILS, "get_mesh_coordinates", "mesh, rank=None"),
    (UTILS, "backend_supports_cuda", "backend=None"),
    (UTILS, "backend_supports_cpu", "backend=None"),
    (UTILS, "do_n_at_a_time", "f, *, n=None, process_group=None, world_size=None, local_rank=None"),
    # KempnerForge, distributed.setup
    (INIT, "get_world_info", ""),
    (INIT, "is_rank_zero", ""),
    (INIT, "_detect_ib_interface", ""),
    (INIT, "_set_nccl_env", ""),
    (INIT, "_barrier_with_timeout", "seconds, reason"),
    (INIT, "_set_seed", "seed, rank, pp_rank=0"),
    (INIT, "destroy_distributed", ""),
    (MESH, "init_distributed", "config, seed=42"),
    # NeMo AutoModel, parallelizer
    (PARALLELIZER, "apply_fsdp_sharding_recursively", "module, mesh, mp_policy, offload_policy=None"),
    (PARALLELIZER, "get_hf_tp_shard_plan", "model"),
    (PARALLELIZER, "import_class_from_path", "name"),
    (PARALLELIZER, "import_classes_from_paths", "class_paths"),
    (PARALLELIZER, "translate_to_torch_parallel_style", "style"),
    (
        PARALLELIZER,
        "fsdp2_strategy_parallelize",
        "model, device_mesh, param_dtype=bfloat16, mp_policy=None, offload_policy=None, sequence_parallel=False, "
        "activation_checkpointing=False, cpu_offload=False, tp_shard_plan=None, dp_mesh_name='data_parallel', "
        "tp_mesh_name='tensor_parallel', dp_cp_mesh_name='dp_cp'",
    ),
    (
        PARALLELIZER,
        "nvfsdp_strategy_parallelize",
        "model, device_mesh, optimizer=None, nvfsdp_unit_modules=None, tp_shard_plan=None, "
        "data_parallel_sharding_strategy='optim_grads_params', init_nvfsdp_with_meta_device=False, "
        "grad_reduce_in_fp32=False, preserve_fp32_weights=False, overlap_grad_reduce=True, "
        "overlap_param_gather=True, check_for_nan_in_grad=True, average_in_collective=False, "
        "disable_bucketing=False, calculate_per_token_loss=False, "
        "keep_fp8_transpose_cache_when_using_custom_fsdp=False, nccl_ub=False, fsdp_double_buffer=False, "
        "dp_mesh_name='data_parallel', cp_mesh_name='context_parallel', tp_mesh_name='tensor_parallel'",
    ),
    (PARALLELIZER, "_destroy_dist_connection", ""),
    (PARALLELIZER, "unshard_fsdp2_model", "model"),
]  # fmt: skip


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("module", "name", "signature"), FUNCTIONS, ids=[f"{module}.{name}" for module, name, _ in FUNCTIONS]
)
def test_functions_have_the_reference_signature(module: str, name: str, signature: str) -> None:
    """Parameter names, order, kinds and defaults."""
    names = {"timedelta": timedelta, "ReduceOp": dist.ReduceOp, "bfloat16": torch.bfloat16}
    expected = eval(f"lambda {signature}: None", names)
    assert _parameters(getattr(importlib.import_module(module), name)) == _parameters(expected)


def test_dist_info_has_the_reference_fields() -> None:
    """NeMo AutoModel, init_utils."""
    dist_info = importlib.import_module(INIT).DistInfo
    assert list(inspect.signature(dist_info).parameters) == ["backend", "rank", "world_size", "device", "is_main"]


def test_first_rank_per_node_has_the_reference_methods() -> None:
    """NeMo AutoModel, utils: constructed without arguments, a context manager and decorator, timeout of 10 hours."""
    first_rank = importlib.import_module(UTILS).FirstRankPerNode
    assert isinstance(first_rank(), ContextDecorator)
    assert _parameters(first_rank().__enter__) == _parameters(lambda timeout=timedelta(hours=10): None)
    assert list(inspect.signature(first_rank().__exit__).parameters) == ["exc_type", "exc_val", "exc_tb"]


def test_module_attributes_of_the_reference_exist() -> None:
    """NeMo AutoModel: utils.logger and parallelizer.HAVE_NVFSDP."""
    assert importlib.import_module(UTILS).logger.name == UTILS
    assert isinstance(importlib.import_module(PARALLELIZER).HAVE_NVFSDP, bool)


def test_training_reexports_get_sync_ctx_and_reduce_loss() -> None:
    """One definition in components/distributed, re-exported by three modules."""
    utils = importlib.import_module(UTILS)
    for name, module in (("get_sync_ctx", "sync"), ("reduce_loss", "loss")):
        function = getattr(utils, name)
        assert function.__module__.startswith("components.distributed.")
        assert getattr(importlib.import_module(f"components.training.{module}"), name) is function
        assert getattr(importlib.import_module("components.training"), name) is function
        assert getattr(importlib.import_module("components.training.step"), name) is function


def test_package_exports_its_names_except_ambiguous_ones() -> None:
    """`init_distributed` and `_barrier_with_timeout` are defined twice, so the package exports neither."""
    for name in package.__all__:
        assert getattr(package, name) is not None
    for name in ("init_distributed", "_barrier_with_timeout", "nonsense"):
        with pytest.raises(AttributeError):
            getattr(package, name)
