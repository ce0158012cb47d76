"""Parallelizing a model over the mesh: expert, tensor and context parallelism, pipeline stages, then FSDP2.

Recipes call `parallelize`. The other exported functions have the signatures of NeMo AutoModel's
components.distributed.parallelizer and use the same building blocks; `nvfsdp_strategy_parallelize` needs Megatron-FSDP
(PyPI megatron-fsdp, formerly nvFSDP), which the optional extra `megatron` installs.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from components.config.mesh_rules import model_problems
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.config.shape import ModelShape, local_heads, shape_of_config
from components.distributed.apply_tp import apply_tensor_parallel
from components.distributed.context_parallel import use_context_parallel
from components.distributed.expert import apply_expert_parallel
from components.distributed.fsdp import (
    Ends,
    apply_fsdp_sharding_recursively,
    keep_uncast,
    mixed_precision,
    offload_to_cpu,
    prefetch_layers,
    shard_with_fsdp2,
    unshard_fsdp2_model,
)
from components.distributed.init import destroy_global_state, get_rank_safe
from components.distributed.mesh import Mesh
from components.distributed.pipeline_schedule import Pipeline
from components.distributed.pipeline_stages import Stages, cut_into_stages
from components.distributed.tp_plan import (
    MissingPlanError,
    TpPlan,
    get_hf_tp_shard_plan,
    import_class_from_path,
    import_classes_from_paths,
    load_plan,
    missing_plan,
    shard_plan,
    shards_any,
    translate_to_torch_parallel_style,
)
from components.models.anatomy import Anatomy, config_of, read_anatomy
from components.protocol.errors import ConfigError

__all__ = [
    "HAVE_NVFSDP",
    "_destroy_dist_connection",
    "apply_fsdp_sharding_recursively",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_class_from_path",
    "import_classes_from_paths",
    "nvfsdp_strategy_parallelize",
    "parallelize",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
]
logger = logging.getLogger(__name__)
HAVE_NVFSDP = importlib.util.find_spec("megatron_fsdp") is not None
"""Whether megatron-fsdp is installed; checked without importing it."""
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model was parallelized."""

    notes: tuple[str, ...] = ()
    """Lines for the banner: replicated attention, plan entries that match no module, the attention method of cp."""
    stages: Stages | None = None
    """This rank's pipeline stages; None without pipeline parallelism."""


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    parallelism: ParallelismConfig,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> Layout:
    """Parallelize a model in place: experts, tensor and context parallelism, pipeline stages, FSDP2 of each stage.

    The model should be on the meta device, to be materialized and loaded shard by shard afterwards.

    Args:
        compute_dtype: Dtype of activations; FSDP2 casts parameters to it.
        anatomy: Anatomy of the model; None: read it from the model.

    Raises ConfigError if the model does not support the mesh, e.g. has no tp plan or a size that tp does not divide.
    """
    anatomy = anatomy or read_anatomy(model)
    config = config_of(model)
    shape = ModelShape(**shape_of_config(config.to_dict())) if config is not None else ModelShape()
    if problems := model_problems(parallelism, mesh.shape, shape):
        raise ConfigError(problems)
    if parallelism.strategy == Strategy.fsdp2:
        _reject_shared_layers(model, anatomy)
    notes: tuple[str, ...] = ()
    stages = None
    param_dtype = next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )  # skips packed 4-bit
    pp_ranks = parallelism.stage_ranks(mesh.size("pp"))
    uncast = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in anatomy.float32]
    # Each step needs the modules as the one before leaves them: tp shards what is no expert, cp wraps attention
    # with its local heads, stages are cut from layers that are complete, and FSDP2 shards what is left of a parameter.
    if mesh.size("ep") > 1 or (mesh.size("tp") > 1 and anatomy.experts):
        axes = tuple(axis for axis in ("ep", "tp") if mesh.size(axis) > 1)
        notes += apply_expert_parallel(model, mesh.device_mesh[axes], anatomy)
    if mesh.size("tp") > 1:
        plan = _select_plan(parallelism.tp_plan, model, anatomy)
        applied = apply_tensor_parallel(
            model,
            mesh["tp"],
            plan,
            anatomy,
            sequence_parallel=parallelism.sequence_parallel,
            strict=parallelism.tp_plan is not None,
            stages=len(pp_ranks),
        )
        notes += applied
    if mesh.size("cp") > 1:
        notes += (_apply_context_parallel(model, mesh, parallelism, shape, anatomy),)
    if mesh.size("pp") > 1:
        stages = cut_into_stages(model, pp_ranks, mesh.rank("pp"), compute_dtype, anatomy)
    if parallelism.strategy == Strategy.fsdp2:
        for module in [stage.module for stage in stages.own] if stages else [model]:
            has_head = stages is None or any(each.module is module and each.index == stages.last for each in stages.own)
            shard_with_fsdp2(
                module,
                mesh.sharding,
                mixed_precision(compute_dtype, param_dtype),
                offload_to_cpu(parallelism.cpu_offload),
                parallelism.reshards_after_forward(mesh.size("pp")),
                mesh.expert_sharding if mesh.size("ep") > 1 else None,
                Ends(
                    _untied_embedding(model, anatomy) if stages is None else None,
                    _norm_and_head(module, anatomy, staged=stages is not None) if has_head else (),
                ),
            )
            keep_uncast(module, uncast)
            prefetch_layers(module, parallelism.prefetch)
    return Layout(notes, stages)


def _untied_embedding(model: nn.Module, anatomy: Anatomy) -> nn.Module | None:
    """Return the input embedding if its weight is not shared with the head, else None."""
    if anatomy.embedding is None or anatomy.head is None or anatomy.tied:
        return None
    embedding, head = (model.get_submodule(name) for name in (anatomy.embedding, anatomy.head))
    return embedding if all("weight" in module._parameters for module in (embedding, head)) else None


def _norm_and_head(module: nn.Module, anatomy: Anatomy, *, staged: bool) -> tuple[nn.Module, ...]:
    """Return the last norm and the head of a model or of its last pipeline stage (`staged`), to be one FSDP2 unit.

    Empty if the head shares its weight with the embedding, of which a pipeline stage has a separate copy.
    """
    if anatomy.head is None or (anatomy.tied and not staged):
        return ()
    head = module.get_submodule(anatomy.head)
    if "weight" not in head._parameters:
        return ()
    return (head,) if anatomy.norm is None else (module.get_submodule(anatomy.norm), head)


def _reject_shared_layers(model: nn.Module, anatomy: Anatomy) -> None:
    """Raise ConfigError if two decoder layers share a parameter: each layer is its own FSDP2 unit."""
    owners: dict[int, str] = {}
    for name, layer in anatomy.decoder_layers(model).items():
        for parameter in layer.parameters():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"parallelism.strategy=fsdp2: {other} and {name} of {type(model).__name__} share parameters, "
                    "which cannot be sharded layer by layer or split into stages; set parallelism=ddp"
                )


def _apply_context_parallel(
    model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig, shape: ModelShape, anatomy: Anatomy
) -> str:
    if shape.heads is None:
        raise ConfigError(
            f"parallelism.cp: the config of {type(model).__name__} has no number of heads; set parallelism.cp=1"
        )
    heads = local_heads(shape.heads, shape.kv_heads or shape.heads, mesh.size("tp"))
    methods = (parallelism.cp_attention, parallelism.cp_linear)
    return use_context_parallel(model, mesh["cp"], methods, heads, anatomy)


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    param_dtype: torch.dtype = torch.bfloat16,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    tp_shard_plan: dict[str, ParallelStyle] | str | None = None,
    dp_mesh_name: str = "data_parallel",
    tp_mesh_name: str = "tensor_parallel",
    dp_cp_mesh_name: str = "dp_cp",
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing of the MLPs and FSDP2.

    Same signature as in NeMo AutoModel's parallelizer. Gradients are summed over the data-parallel mesh: divide once by
    the global number of targets. Only the root's output is cast to float32. Attention whose heads tp does not divide is
    removed from any plan and replicated over tp; rank 0 logs a warning.

    Args:
        tp_shard_plan: Replaces the model's own plan: a dict (may be empty), or the import path of a dict or of a
            function that returns one.

    Raises ConfigError for a plan that is missing, matches nothing or shards a size that tp does not divide, and for a
    mesh axis with several ranks that is neither the tp axis nor part of the data-parallel mesh.
    """
    names = device_mesh.mesh_dim_names or ()
    anatomy = read_anatomy(model)
    data_mesh = _data_mesh(device_mesh, dp_cp_mesh_name, dp_mesh_name)
    _reject_uncovered_axes(device_mesh, data_mesh, tp_mesh_name)
    if tp_mesh_name in names and device_mesh[tp_mesh_name].size() > 1:
        plan = _select_plan(tp_shard_plan, model, anatomy)
        applied = apply_tensor_parallel(
            model,
            device_mesh[tp_mesh_name],
            plan,
            anatomy,
            sequence_parallel=sequence_parallel,
            strict=tp_shard_plan is not None,
        )
        for note in applied if get_rank_safe() == 0 else ():
            logger.warning(note)
    if activation_checkpointing:
        _checkpoint_mlps(model)
    if mp_policy is None:
        mp_policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    shard_with_fsdp2(
        model,
        data_mesh,
        mp_policy,
        offload_policy or offload_to_cpu(cpu_offload),
        ends=Ends(_untied_embedding(model, anatomy), _norm_and_head(model, anatomy, staged=False)),
    )
    return model


def _destroy_dist_connection() -> None:
    """Destroy the process group; NeMo AutoModel's name for `destroy_global_state`."""
    destroy_global_state()


def _select_plan(plan: dict[str, ParallelStyle] | str | None, model: nn.Module, anatomy: Anatomy) -> TpPlan:
    """Return the user's plan if given, even if empty, or the model's own.

    Raises MissingPlanError if the model's own plan shards no decoder layer.
    """
    if plan is not None:
        return load_plan(plan, model) if isinstance(plan, str) else plan
    model_plan = shard_plan(model, anatomy)
    if not shards_any(model, model_plan, anatomy.layers or ("",)):
        raise MissingPlanError(missing_plan(model))
    return model_plan


def _data_mesh(device_mesh: DeviceMesh, *candidates: str) -> DeviceMesh:
    """Return the first candidate that is an axis or a flattened view of the mesh."""
    for name in candidates:
        try:
            return device_mesh[name]
        except KeyError:
            continue
    raise ConfigError(
        f"device_mesh{device_mesh.mesh_dim_names or ()}: has none of the axes {', '.join(candidates)}; name the "
        "data-parallel axis by dp_mesh_name or dp_cp_mesh_name"
    )


def _reject_uncovered_axes(device_mesh: DeviceMesh, data_mesh: DeviceMesh, tp_mesh_name: str) -> None:
    """Raise ConfigError for an axis with several ranks over which parameters are not sharded or gradients summed."""
    covered = set(data_mesh.mesh.flatten().tolist())
    names = device_mesh.mesh_dim_names or ()
    axes = {name: device_mesh[name].mesh.flatten().tolist() for name in names if name != tp_mesh_name}
    # Compared by ranks, because a flattened mesh does not list its axes.
    missing = [name for name, ranks in axes.items() if len(ranks) > 1 and not covered.issuperset(ranks)]
    if missing:
        raise ConfigError(
            f"device_mesh{names}: nothing is sharded or summed over {', '.join(missing)}, so parameters would diverge "
            "between its ranks; name the axes by dp_mesh_name, tp_mesh_name and dp_cp_mesh_name (which may be a "
            'flattened mesh, such as mesh["dp", "cp"]._flatten("dp_cp")), or pass a mesh without these axes'
        )


def _checkpoint_mlps(model: nn.Module) -> None:
    """Apply activation checkpointing to every MLP by patching its forward, so that parameter names do not change."""
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            compute: Callable[..., Any] = module.forward
            module.forward = partial(checkpoint, compute, use_reentrant=False)


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
    return _call_megatron_fsdp(arguments, optimizer)


def _call_megatron_fsdp(
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


def wrap_replicas(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig, layout: Layout) -> nn.Module | Pipeline:
    """Return the callable for training: a Pipeline under pp, DDP around the loaded model, or the model itself.

    DDP's gradients are SUMMED over the replicas, like FSDP2's: the training step divides once.
    """
    if layout.stages is not None:
        return Pipeline(model, layout.stages, mesh["pp"], parallelism.pp_schedule)
    if parallelism.strategy != Strategy.ddp or mesh.size("dp_replicate") == 1:
        return model
    group = mesh["dp_replicate"].get_group()
    replica = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    replica.register_comm_hook(group, _sum_gradients)
    return replica


def _sum_gradients(group, bucket):
    """DDP communication hook: sum a bucket of gradients over the replicas, 16-bit ones in float32."""
    # No annotations: DDP compares a hook's annotations with classes, and postponed ones are strings.
    gradients = bucket.buffer()
    summand = gradients.float() if gradients.dtype.itemsize == 2 else gradients
    work = torch.distributed.all_reduce(summand, group=group, async_op=True)
    return work.get_future().then(lambda _: gradients.copy_(summand))  # a simulation's futures have no value
