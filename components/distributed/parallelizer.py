"""Laying a model over the mesh: tensor parallel first, then FSDP2, both on the meta device if the model is there.

`parallelize` is what recipes call; the functions of the seed page stand on the same parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import checkpoint

from components.config.errors import ConfigError
from components.config.layouts import local_heads
from components.config.rules.mesh_rules import model_problems
from components.config.schema.parallelism import SPLIT_BACKWARD, ParallelismConfig, Strategy
from components.config.shape import ModelShape, shape_of_config
from components.distributed.context_parallel import use_context_parallel
from components.distributed.expert import apply_expert_parallel
from components.distributed.fsdp import (
    apply_fsdp_sharding_recursively,
    mixed_precision,
    offload_to_cpu,
    prefetch_layers,
    shard_with_fsdp2,
    unshard_fsdp2_model,
)
from components.distributed.init import destroy_global_state, get_rank_safe
from components.distributed.megatron import HAVE_NVFSDP, nvfsdp_strategy_parallelize
from components.distributed.mesh import Mesh
from components.distributed.pipeline.stages import Stages, cut_into_stages
from components.distributed.tensor.apply_tp import apply_tensor_parallel
from components.distributed.tensor.tp_plan import (
    MissingPlanError,
    Plan,
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


@dataclass(frozen=True, slots=True)
class Layout:
    """What became of a model on the mesh, for the banner."""

    tp_fraction: float = 0.0
    """Part of the parameters that is sharded over tp, in [0, 1]."""
    notes: tuple[str, ...] = ()
    """What a person should know: attention left replicated, plan entries without a module, how cp attends."""
    stages: Stages | None = None
    """This rank's part of a pipeline; None without one."""


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    parallelism: ParallelismConfig,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> Layout:
    """Lay a model over the mesh in place: tensor and context parallel, pipeline stages, FSDP2 over each stage.

    The model should be on the meta device, to be materialised and loaded shard by shard afterwards.
    Raises ConfigError for a model without a plan under tp > 1 and for sizes that tp does not divide.

    Args:
        anatomy: The model's; None: read it.
    """
    anatomy = anatomy or read_anatomy(model)
    config = config_of(model)
    shape = ModelShape(**shape_of_config(config.to_dict())) if config is not None else ModelShape()
    if problems := model_problems(parallelism, mesh.shape, shape):
        raise ConfigError(problems)
    if parallelism.strategy == Strategy.fsdp2:
        _refuse_shared_layers(model, anatomy)
    notes: tuple[str, ...] = ()
    fraction, stages = 0.0, None
    stored = next(each.dtype for each in model.parameters() if each.is_floating_point())  # others are packed
    places = parallelism.stage_places(mesh.size("pp"))
    if mesh.size("ep") > 1 or (mesh.size("tp") > 1 and anatomy.experts):
        axes = tuple(axis for axis in ("ep", "tp") if mesh.size(axis) > 1)
        notes += apply_expert_parallel(model, mesh.device_mesh[axes], anatomy)
    if mesh.size("tp") > 1:
        plan = _given_plan(parallelism.tp_plan, model, anatomy)
        applied = apply_tensor_parallel(
            model,
            mesh["tp"],
            plan,
            anatomy,
            sequence_parallel=parallelism.sequence_parallel,
            strict=parallelism.tp_plan is not None,
            stages=len(places),
        )
        fraction = applied.fraction
        notes += applied.notes
    if mesh.size("cp") > 1:
        notes += (_apply_context_parallel(model, mesh, parallelism, shape, anatomy),)
    if mesh.size("pp") > 1:
        stages = cut_into_stages(model, places, mesh.rank("pp"), compute_dtype, anatomy)
    if parallelism.strategy == Strategy.fsdp2:
        # Between the two halves of a split backward the parameters must stay where the first half found them.
        split = stages is not None and parallelism.pp_schedule in SPLIT_BACKWARD
        for module in [stage.module for stage in stages.own] if stages else [model]:
            shard_with_fsdp2(
                module,
                mesh.sharding,
                mixed_precision(compute_dtype, stored),
                offload_to_cpu(parallelism.cpu_offload),
                parallelism.reshard_after_forward and not split,
                mesh.expert_sharding if mesh.size("ep") > 1 else None,
                _untied_embedding(model, anatomy) if stages is None else None,
            )
            prefetch_layers(module, parallelism.prefetch)
    return Layout(fraction, notes, stages)


def _untied_embedding(model: nn.Module, anatomy: Anatomy) -> nn.Module | None:
    """Return an input embedding with a weight of its own beside that of the head, None if there is none."""
    if anatomy.embedding is None or anatomy.head is None or anatomy.tied:
        return None
    embedding, head = (model.get_submodule(name) for name in (anatomy.embedding, anatomy.head))
    return embedding if all("weight" in module._parameters for module in (embedding, head)) else None


def _refuse_shared_layers(model: nn.Module, anatomy: Anatomy) -> None:
    """FSDP shards layer by layer, and pipelines cut between layers: two of them cannot share a parameter."""
    holders: dict[int, str] = {}
    for name, layer in anatomy.decoder_layers(model).items():
        for parameter in layer.parameters():
            other = holders.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"parallelism.strategy=fsdp2: {other} and {name} of {type(model).__name__} share parameters, which "
                    "can neither be sharded layer by layer nor cut into stages; set parallelism.strategy=ddp"
                )


def _apply_context_parallel(
    model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig, shape: ModelShape, anatomy: Anatomy
) -> str:
    if shape.heads is None:
        raise ConfigError(f"parallelism.cp: {type(model).__name__} states no number of heads; set parallelism.cp=1")
    heads = local_heads(shape.heads, shape.kv_heads or shape.heads, mesh.size("tp"))
    return use_context_parallel(model, mesh["cp"], parallelism.cp_attention, heads, anatomy)


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
    """Apply tensor parallelism, activation checkpointing of the MLPs and FSDP2 (seed page 004, NeMo AutoModel).

    A custom plan (a dict, also an empty one, or an import path of one or of a function that returns one) wins over the
    model's own. Gradients are summed over the data-parallel mesh: divide once by the global token count. Only the
    root's output is cast to float32. Attention whose heads tp does not divide leaves the plan, a custom one too, and is
    computed by every tp rank, of which rank 0 logs a warning.

    Raises ConfigError where a plan is missing, matches nothing, or does not divide a layer, and for a mesh with an axis
    of several ranks that is neither the tp axis nor part of the data-parallel mesh.
    """
    names = device_mesh.mesh_dim_names or ()
    anatomy = read_anatomy(model)
    data_mesh = _data_mesh(device_mesh, dp_cp_mesh_name, dp_mesh_name)
    _refuse_uncovered_axes(device_mesh, data_mesh, tp_mesh_name)
    if tp_mesh_name in names and device_mesh[tp_mesh_name].size() > 1:
        plan = _given_plan(tp_shard_plan, model, anatomy)
        applied = apply_tensor_parallel(
            model,
            device_mesh[tp_mesh_name],
            plan,
            anatomy,
            sequence_parallel=sequence_parallel,
            strict=tp_shard_plan is not None,
        )
        for note in applied.notes if get_rank_safe() == 0 else ():
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
        embedding=_untied_embedding(model, anatomy),
    )
    return model


def _destroy_dist_connection() -> None:
    """Destroy the process group, as `destroy_global_state` does (seed page 004, NeMo AutoModel)."""
    destroy_global_state()


def _given_plan(plan: dict[str, ParallelStyle] | str | None, model: nn.Module, anatomy: Anatomy) -> Plan:
    """Return the user's plan, also an empty one, or else the model's own, which must shard decoder layers."""
    if plan is not None:
        return load_plan(plan, model) if isinstance(plan, str) else plan
    own = shard_plan(model, anatomy)
    if not shards_any(model, own, anatomy.layers or ("",)):
        raise MissingPlanError(missing_plan(model))
    return own


def _data_mesh(device_mesh: DeviceMesh, *candidates: str) -> DeviceMesh:
    """Return the first of the named meshes that exists; flattened ones are found by name too."""
    for name in candidates:
        try:
            return device_mesh[name]
        except KeyError:
            continue
    raise ConfigError(f"the mesh {device_mesh.mesh_dim_names} has none of the axes {', '.join(candidates)}")


def _refuse_uncovered_axes(device_mesh: DeviceMesh, data_mesh: DeviceMesh, tp_mesh_name: str) -> None:
    """Raise ConfigError for an axis of several ranks over which nothing would be sharded or summed."""
    covered = set(data_mesh.mesh.flatten().tolist())
    names = device_mesh.mesh_dim_names or ()
    axes = {name: device_mesh[name].mesh.flatten().tolist() for name in names if name != tp_mesh_name}
    # A flattened mesh covers every axis whose ranks are among its own.
    missing = [name for name, ranks in axes.items() if len(ranks) > 1 and not covered.issuperset(ranks)]
    if missing:
        raise ConfigError(
            f"device_mesh{names}: nothing is sharded or summed over {', '.join(missing)}, so that ranks would drift "
            "apart; name the axes by dp_mesh_name, tp_mesh_name and dp_cp_mesh_name (which may be a flattened mesh, "
            'such as mesh["dp", "cp"]._flatten("dp_cp")), or pass a mesh without these axes'
        )


def _checkpoint_mlps(model: nn.Module) -> None:
    """Recompute every MLP in the backward; parameter names stay as they are."""
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            compute: Callable[..., Any] = module.forward
            module.forward = partial(checkpoint, compute, use_reentrant=False)
