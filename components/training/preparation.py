"""Preparation of a model: build on meta, parallelize, fill with weights.

The device's memory decides what `auto` of activation checkpointing and gradient reduction resolves to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from components import checkpoint, distributed, models
from components.config.compute_rules import NO_DEVICE_MEMORY
from components.config.schema.model import DType, LossMethod, ModelConfig
from components.config.schema.objective import (
    DistillationConfig,
    ObjectiveConfig,
    PreferenceConfig,
    RewardConfig,
    ScoreConfig,
)
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.recipes import (
    EvaluateConfig,
    RecipeConfig,
    TrainConfig,
    score_labels,
    section,
    with_section,
)
from components.config.schema.run import PeftConfig
from components.config.schema.training import EvaluationConfig, TrainingConfig
from components.config.shape import shape_of_built
from components.distributed.init import get_local_world_size_preinit
from components.distributed.mesh import Mesh
from components.kernel_counters import usable_memory
from components.models.anatomy import Anatomy, config_of
from components.planning.formulas.architecture import read_architecture
from components.planning.formulas.memory_check import (
    GIB,
    RESERVED_BYTES,
    chooses_grad_sync,
    fitting_grad_sync,
    fitting_policy,
    grad_sync_peaks,
    policy_peaks,
)
from components.planning.formulas.workload import Workload, build_workload
from components.protocol.errors import ConfigError
from components.training.context import RunContext
from components.training.flops import step_flops
from components.training.objectives.loss_head import attach_loss_head
from components.training.prepared import Prepared, StepSettings, autocast_dtype, compute_dtype, stored_dtype
from components.training.router_loss import attach_router_loss


def prepare(cfg: RecipeConfig, run: RunContext, vocabulary: int) -> Prepared:
    """Build a model on meta, parallelize it, and load this rank's shards. A collective: call it on all ranks.

    Adapters are added before sharding, so that they are sharded like their layers; `prepare_built` does the rest.

    Args:
        vocabulary: Vocabulary size of the tokenizer; a model from scratch gets as many embeddings.

    Raises ConfigError for an unsupported model, or a model that the mesh cannot run.
    """
    cfg = with_section(cfg, cfg.model, replace(cfg.model, dtype=_stored_dtype(cfg, run)))
    labels = score_labels(cfg.data, section(cfg, ObjectiveConfig))
    model = models.build_on_meta(cfg.model, vocabulary, labels)
    for name, sizes in (("training", section(cfg, TrainingConfig)), ("evaluation", section(cfg, EvaluationConfig))):
        if sizes is not None:
            models.check_positions(model, f"{name}.seq_len", sizes.seq_len)
    anatomy = models.read_anatomy(model)
    models.add_adapters(model, _adapters(cfg), exports=section(cfg, TrainingConfig) is not None)
    return prepare_built(model, anatomy, cfg, run)


def prepare_built(model: Any, anatomy: Anatomy, cfg: RecipeConfig, run: RunContext, fill: Any = None) -> Prepared:
    """Parallelize a model that is on meta, with its adapters, and load this rank's shards. A collective.

    The order matters. The loss head and the activation-checkpointing policy are chosen on meta, before memory is
    allocated. Layers are compiled one by one, so that FSDP's hooks and the DDP wrapper, which comes last, stay outside
    of compiled code. Without a training section in the config the model can only be evaluated.

    Args:
        anatomy: Anatomy of the model without adapters. fill: Sets the weights; None: `models.fill_weights`.

    Raises ConfigError for a model that the mesh cannot run.
    """
    mesh, device, training = run.mesh, run.device, _sizes_in_rows(cfg)
    trains = training is not None
    dtype, dtype_note = compute_dtype(cfg.model, device, adapts=_adapters(cfg).adapts)
    flops = step_flops(model, cfg.logging, mesh, device, dtype, anatomy) if trains else None
    recompute, grad_sync, parallelism, on_gpu = None, None, cfg.parallelism, device.type == "cuda"
    if training is not None:
        grad_sync = choose_grad_sync(cfg, model, mesh, device)
        cfg = replace(cfg, parallelism=replace(parallelism, defer_grad_sync=str(grad_sync.deferred)))
        recompute = choose_recompute_policy(cfg, model, mesh, device)
        parallelism = replace(cfg.parallelism, activation_checkpointing=recompute.policy)
    packs = cfg.data.pack
    compiles = cfg.model.compiles(parallelism, packs=packs, on_gpu=on_gpu)
    fuses = cfg.model.fuses(parallelism, packs=packs, on_gpu=on_gpu)
    layers: list[Any] = [models.fuse_layers(model)] if fuses else []
    if cfg.parallelism.async_tp and not on_gpu:
        raise ConfigError(
            f"parallelism.async_tp=true: needs the symmetric memory of GPUs, and this rank computes on {device}; set "
            "it to false"
        )
    if compiles:
        layers.append(f"layers: compiled one by one{', async tp' * cfg.parallelism.async_tp}")
    elif on_gpu and cfg.model.compile == "auto":
        layers.append(f"layers: not compiled, because of {cfg.model.uncompiled_because(parallelism, packs=packs)}")
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype, anatomy)
    router_loss = attach_router_loss(model, cfg.model, mesh, anatomy) if trains else None
    sizes = training or section(cfg, EvaluationConfig) or EvaluationConfig()
    loss_head = None
    if section(cfg, ScoreConfig) is None:
        how = replace(_model_config(cfg), compile=str(compiles))
        loss_head = attach_loss_head(model, how, sizes, parallelism, mesh, layout.stages, device)
    if recompute is not None:
        models.checkpoint_activations(model, recompute.policy, anatomy)
    if compiles:
        async_tp = mesh["tp"].get_group() if cfg.parallelism.async_tp else None
        models.compile_layers(model, anatomy=anatomy, async_tp=async_tp)
    if parallelism.activation_offload and trains:
        if not on_gpu:
            raise ConfigError(NO_DEVICE_MEMORY.format(device=device.type))
        offloaded = models.offload_activations(model, device, anatomy)
        layers.append(f"activations: those of {offloaded} layers are saved in host memory")
    models.materialize(model, device, offload=cfg.parallelism.cpu_offload)
    if run.resume_from is None or _adapters(cfg).adapts:  # a checkpoint of adapters does not contain base weights
        (fill or models.fill_weights)(model, cfg.model, cfg.run.seed)
    counts = models.count_parameters(model)
    notes = [*layers, models.untrained_note(model)] if trains else layers
    prepared = Prepared(
        module=model,
        replica=distributed.wrap_replicas(model, mesh, cfg.parallelism, layout),
        settings=StepSettings(
            device=device,
            max_grad_norm=0.0 if training is None else training.max_grad_norm,
            defer_grad_sync=cfg.parallelism.defers_grad_sync,
            mesh=mesh,
            autocast=autocast_dtype(cfg.parallelism, cfg.model, dtype),
            router_loss=router_loss,
            loss_head=loss_head,
            flops=flops,
            counts_inputs=section(cfg, ScoreConfig) is not None,
        ),
        parallelism=cfg.parallelism,
        compute_dtype=dtype,
        stored_dtype=str(cfg.model.stored_dtype()),
        anatomy=anatomy,
        counts=counts,
        summary=f"{counts}, {cfg.model.stored_dtype()}, {dtype_note}",
        notes=[each for each in (*layout.notes, *notes, router_loss, loss_head, recompute, grad_sync, flops) if each],
    )
    return prepared if training is None else prepared.with_average(training)


def _stored_dtype(cfg: RecipeConfig, run: RunContext) -> DType:
    """Return the dtype of the model's parameters: with model.dtype=auto that of the checkpoint, if there is one.

    Adapters belong to base weights of one dtype, whichever device continues or evaluates them.
    """
    if cfg.model.dtype == DType.auto and run.resume_from is not None:
        saved = checkpoint.stored_dtype_of(run.resume_from)
        if saved is not None:
            return DType(saved)
    return stored_dtype(cfg.model, run.device, adapts=_adapters(cfg).adapts)


def _sizes_in_rows(cfg: RecipeConfig) -> TrainingConfig | None:
    """Return the training section with batch sizes in rows, two of which are a pair of answers."""
    training = section(cfg, TrainingConfig)
    if training is None or (section(cfg, PreferenceConfig) or section(cfg, RewardConfig)) is None:
        return training
    return replace(
        training, global_batch_size=2 * training.global_batch_size, micro_batch_size=2 * training.micro_batch_size
    )


def _model_config(cfg: RecipeConfig) -> ModelConfig:
    """Return the model section; distillation needs both models' logits in the same chunks."""
    return cfg.model if section(cfg, DistillationConfig) is None else replace(cfg.model, loss=LossMethod.chunked)


def prepare_frozen(cfg: TrainConfig, run: RunContext, vocabulary: int, model: ModelConfig | None = None) -> Prepared:
    """Build a model that is not trained, on the same mesh. A collective.

    Args:
        vocabulary: Vocabulary size of the tokenizer.
        model: The model; None: the config's model before training, also in a run that resumes.
    """
    model = model or replace(cfg.model, dtype=_stored_dtype(cfg, run))
    prepared = prepare(frozen_config(cfg, model), RunContext(run.mesh, run.device), vocabulary)
    prepared.module.requires_grad_(False).eval()
    return prepared


def frozen_config(cfg: TrainConfig, model: ModelConfig) -> EvaluateConfig:
    """Return the config of a model that is not trained, with the mesh and the batch sizes of a training run."""
    rows = _sizes_in_rows(cfg) or cfg.training
    return EvaluateConfig(
        run=cfg.run,
        cluster=cfg.cluster,
        parallelism=cfg.parallelism,
        model=model,
        data=cfg.data,
        logging=cfg.logging,
        evaluation=EvaluationConfig(
            seq_len=rows.seq_len,
            micro_batch_size=rows.micro_batch_size,
            step_timeout_seconds=rows.step_timeout_seconds,
        ),
    )


def _adapters(cfg: RecipeConfig) -> PeftConfig:
    return section(cfg, PeftConfig) or PeftConfig()


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """An activation-checkpointing policy, and the reason for it if `auto` chose it."""

    policy: ActivationCheckpointing
    why: str = ""
    """Reason for the banner; empty if the policy was configured."""

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return f"activation checkpointing: {self.policy}, {self.why}"


@dataclass(frozen=True, slots=True)
class GradSync:
    """When gradients of several micro-batches are reduced, and the reason for it if `auto` chose it."""

    deferred: bool
    """Whether they are reduced once per optimizer step."""
    why: str = ""
    """Reason for the banner; empty if the memory did not matter."""

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return f"gradients: reduced {'once per step' if self.deferred else 'per micro-batch'}, {self.why}"


def choose_grad_sync(
    cfg: RecipeConfig, model: nn.Module, mesh: Mesh, device: torch.device, memory: int | None = None
) -> GradSync:
    """Return the configured parallelism.defer_grad_sync, or what `auto` resolves to: true unless it does not fit.

    Also true on a CPU, without accumulation or FSDP2, and if the memory cannot be estimated. The memory is the
    planner's estimate for the fullest rank. A collective if it matters.

    Args:
        model: The whole model, also if it is sharded.
        memory: Bytes available to this rank; None: the memory of its GPU.
    """
    try:
        workload = _workload(cfg, model, mesh, device, memory)
        if not isinstance(cfg, TrainConfig) or not chooses_grad_sync(workload, device.type):
            return GradSync(cfg.parallelism.defers_grad_sync)
        peaks = grad_sync_peaks(cfg, workload, device.type)
    except ConfigError as error:
        why = ""
        if cfg.parallelism.defer_grad_sync == "auto" and device.type == "cuda":
            why = f"because the memory of a step cannot be estimated: {error}"
        return GradSync(cfg.parallelism.defers_grad_sync, why)
    memory = _least_over_ranks(_available_memory(device) if memory is None else memory, device)
    usable = max(memory - RESERVED_BYTES, 0.0)
    deferred, reduced = peaks[-1]
    least = " with the most recomputation" if len(peaks) > 1 else ""
    return GradSync(
        fitting_grad_sync(peaks, usable),
        f"of {usable / GIB:,.2f} GiB usable per rank they need an estimated {deferred / GIB:,.2f} once per step, "
        f"{reduced / GIB:,.2f} per micro-batch{least}",
    )


def choose_recompute_policy(
    cfg: RecipeConfig, model: nn.Module, mesh: Mesh, device: torch.device, memory: int | None = None
) -> RecomputePolicy:
    """Return the configured policy, or the one that `auto` resolves to: full if the memory cannot be estimated.

    The memory of each policy is the planner's estimate for the fullest rank. A collective with `auto`.

    Args:
        model: The whole model, also if it is sharded.
        memory: Bytes available to this rank; None: the memory of its GPU, or its share of the host's.
    """
    configured = cfg.parallelism.activation_checkpointing
    if configured is not ActivationCheckpointing.auto:
        return RecomputePolicy(configured)
    memory = _least_over_ranks(_available_memory(device) if memory is None else memory, device)
    try:
        workload = _workload(cfg, model, mesh, device, memory)
        peaks = policy_peaks(cfg, workload, device.type)  # type: ignore[arg-type]
    except ConfigError as error:
        why = f"because the memory of a step cannot be estimated: {error}"
        return RecomputePolicy(ActivationCheckpointing.full, why)
    usable = max(memory - RESERVED_BYTES, 0.0)
    estimates = ", ".join(f"{each} {peak / GIB:,.2f}" for each, peak in peaks.items())
    why = f"of {usable / GIB:,.2f} GiB usable per rank the policies need an estimated {estimates}"
    return RecomputePolicy(fitting_policy(peaks, usable), why)


def _workload(cfg: RecipeConfig, model: nn.Module, mesh: Mesh, device: torch.device, memory: int | None) -> Workload:
    """Return the work of a step. Raises ConfigError if the formulas do not cover the model or the recipe."""
    config = config_of(model)
    if config is None or not isinstance(cfg, TrainConfig):
        raise ConfigError("the formulas cover transformers' models and recipes whose config is a TrainConfig")
    text = config.get_text_config()
    architecture = read_architecture(shape_of_built(text.to_dict()), text.model_type)
    on_gpu = device.type == "cuda"
    if memory is None and on_gpu:
        memory = _available_memory(device)
    return build_workload(
        cfg, mesh.shape, on_gpu=on_gpu, architecture=architecture, device_memory=memory if on_gpu else None
    )


def _available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return usable_memory() // max(1, get_local_world_size_preinit())


def _least_over_ranks(memory: int, device: torch.device) -> int:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return memory
    least = torch.tensor(memory, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
