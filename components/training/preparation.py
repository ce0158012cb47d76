"""Preparation of a model: build on meta, parallelize, fill with weights, and checks before the first step.

The device's memory decides what `auto` of activation checkpointing and gradient reduction resolves to. The checks are
of the attention kernel in use and of float8's effect on the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from components import checkpoint, distributed, models
from components.batch import Batch
from components.config.compute_rules import NO_DEVICE_MEMORY
from components.config.schema.model import NO_FLEX_BACKWARD, Attention, DType, Float8, LossMethod, ModelConfig
from components.config.schema.objective import (
    DistillationConfig,
    ObjectiveConfig,
    PolicyConfig,
    ScoreConfig,
)
from components.config.schema.optimizer import OptimizerConfig
from components.config.schema.parallelism import ActivationCheckpointing, ParallelismConfig
from components.config.schema.recipes import (
    RecipeConfig,
    TrainConfig,
    frozen_config,
    score_labels,
    section,
    sizes_in_rows,
    with_section,
)
from components.config.schema.run import PeftConfig
from components.config.schema.training import EvaluationConfig, TrainingConfig
from components.config.shape import shape_of_built
from components.distributed.init import get_local_world_size_preinit
from components.distributed.mesh import Mesh
from components.json_collectives import all_gather_json, broadcast_json, this_rank
from components.models.anatomy import Anatomy, config_of
from components.models.quantization import float8_layers, without_float8
from components.planning.formulas.architecture import read_architecture
from components.planning.formulas.policies import (
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
from components.protocol.processes import usable_memory
from components.torch_kernels import torch_dtype
from components.training.context import RunContext
from components.training.evaluation import evaluate
from components.training.objectives import PLAIN, TokenObjective
from components.training.objectives.loss_head import attach_loss_head
from components.training.optimizers.gradients import SpikeWindow
from components.training.prepared import (
    EmbeddingNoise,
    Prepared,
    StepSettings,
    autocast_dtype,
    compute_dtype,
    stored_dtype,
)
from components.training.routers import attach_routers
from components.training.state import TrainState
from components.training.step import forward_loss, local_batch
from components.training.step_cost import step_flops

if TYPE_CHECKING:
    from components.models.attention import ObservedAttention
    from components.training.run import Run


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
    training, optimizer = section(cfg, TrainingConfig), section(cfg, OptimizerConfig)
    models.add_adapters(model, _adapters(cfg), exports=training is not None)
    if training is not None:
        models.select_trained(model, training, [] if optimizer is None else optimizer.groups)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    frozen = [name for name, each in model.named_modules() if each in ends and not each.weight.requires_grad]
    if training is not None and cfg.model.new_tokens and frozen:
        change = "to peft.modules_to_save" if _adapters(cfg).adapts else "to what training.freeze and .trainable train"
        raise ConfigError(
            f"model.new_tokens: {', '.join(frozen)} is frozen, so that they would not be learned; add it {change}"
        )
    return prepare_built(model, anatomy, cfg, run)


def prepare_built(model: Any, anatomy: Anatomy, cfg: RecipeConfig, run: RunContext, fill: Any = None) -> Prepared:
    """Parallelize a model that is on meta, with its adapters, and load this rank's shards. A collective.

    The order matters. The loss head and the activation-checkpointing policy are chosen on meta, before memory is
    allocated. Layers are compiled one by one, so that FSDP's hooks and the DDP wrapper, which comes last, stay outside
    of compiled code. Without a training section in the config the model can only be evaluated.

    Args:
        model: With adapters, and with what is not trained frozen (`models.select_trained`).
        anatomy: Anatomy of the model without adapters. fill: Sets the weights; None: `models.fill_weights`.

    Raises ConfigError for a model that the mesh cannot run.
    """
    mesh, device, training = run.mesh, run.device, sizes_in_rows(cfg)
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
    if not on_gpu:
        _reject_gpu_options(parallelism, device, trains=trains)
    if compiles:
        layers.append(f"layers: compiled one by one{', async tp' * cfg.parallelism.async_tp}")
    elif on_gpu and cfg.model.compile == "auto":
        layers.append(f"layers: not compiled, because of {cfg.model.uncompiled_because(parallelism, packs=packs)}")
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype, anatomy)
    routers = attach_routers(model, cfg.model, mesh, anatomy, cfg.logging.experts) if trains else None
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
        offloaded = models.offload_activations(model, device, anatomy)
        layers.append(f"activations: those of {offloaded} layers are saved in host memory")
    models.materialize(model, device, offload=cfg.parallelism.cpu_offload)
    if run.resume_from is None or _adapters(cfg).adapts:  # a checkpoint of adapters does not contain base weights
        (fill or models.fill_weights)(model, cfg.model, cfg.run.seed)
    layers.append(_start_from_adapter(model, cfg, run))
    counts = models.count_parameters(model)
    noise = EmbeddingNoise.attached(model, anatomy, layout.stages, training, cfg.run.seed)
    notes = [*layers, *models.file_notes(model), noise] if trains else layers
    prepared = Prepared(
        module=model,
        replica=distributed.wrap_replicas(model, mesh, cfg.parallelism, layout),
        settings=StepSettings(
            device=device,
            max_grad_norm=0.0 if training is None else training.max_grad_norm,
            defer_grad_sync=cfg.parallelism.defers_grad_sync,
            mesh=mesh,
            autocast=autocast_dtype(cfg.parallelism, cfg.model, dtype),
            routers=routers,
            loss_head=loss_head,
            noise=noise,
            spikes=None if training is None else SpikeWindow.of(training, device),
            flops=flops,
            counts_inputs=section(cfg, ScoreConfig) is not None,
        ),
        parallelism=cfg.parallelism,
        compute_dtype=dtype,
        stored_dtype=str(cfg.model.stored_dtype()),
        anatomy=anatomy,
        counts=counts,
        summary=f"{counts}, {cfg.model.stored_dtype()}, {dtype_note}",
        notes=[each for each in (*layout.notes, *notes, routers, loss_head, recompute, grad_sync, flops) if each],
    )
    return prepared if training is None else prepared.with_average(training)


def _start_from_adapter(model: Any, cfg: RecipeConfig, run: RunContext) -> str:
    """Load the adapter at peft.path, unless a checkpoint replaces it; return a note for the banner. A collective."""
    peft, evaluation = _adapters(cfg), section(cfg, EvaluationConfig)
    if peft.path is None or run.resume_from is not None or (evaluation and evaluation.checkpoint is not None):
        return ""
    return checkpoint.load_adapter(model, peft, torch_dtype(cfg.model.stored_dtype()))


def _reject_gpu_options(parallelism: ParallelismConfig, device: torch.device, *, trains: bool) -> None:
    """Raise ConfigError for settings that need a GPU."""
    if parallelism.async_tp:
        raise ConfigError(
            f"parallelism.async_tp=true: needs the symmetric memory of GPUs, and this rank computes on {device}; set "
            "it to false"
        )
    if parallelism.activation_offload and trains:
        raise ConfigError(NO_DEVICE_MEMORY.format(device=device.type))


def _stored_dtype(cfg: RecipeConfig, run: RunContext) -> DType:
    """Return the dtype of the model's parameters: with model.dtype=auto that of the checkpoint, if there is one.

    Adapters belong to base weights of one dtype, whichever device continues or evaluates them.
    """
    if cfg.model.dtype == DType.auto and run.resume_from is not None:
        saved = checkpoint.stored_dtype_of(run.resume_from)
        if saved is not None:
            return DType(saved)
    return stored_dtype(cfg.model, run.device, adapts=_adapters(cfg).adapts)


def _model_config(cfg: RecipeConfig) -> ModelConfig:
    """Return the model section; losses that use values of each token are computed in chunks of tokens."""
    takes_values = section(cfg, DistillationConfig) or section(cfg, PolicyConfig)
    return replace(cfg.model, loss=LossMethod.chunked) if takes_values else cfg.model


def prepare_frozen(cfg: TrainConfig, run: RunContext, vocabulary: int, model: ModelConfig | None = None) -> Prepared:
    """Build a model that is not trained, on the same mesh. A collective.

    Args:
        vocabulary: Vocabulary size of the tokenizer.
        model: The model; None: the config's model before training, also in a run that resumes.
    """
    model = model or replace(_model_config(cfg), dtype=_stored_dtype(cfg, run))
    prepared = prepare(frozen_config(cfg, model), RunContext(run.mesh, run.device), vocabulary)
    prepared.module.requires_grad_(False).eval()
    return prepared


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
        reason = ""
        if cfg.parallelism.defer_grad_sync == "auto" and device.type == "cuda":
            reason = f"because the memory of a step cannot be estimated: {error}"
        return GradSync(cfg.parallelism.defers_grad_sync, reason)
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
        reason = f"because the memory of a step cannot be estimated: {error}"
        return RecomputePolicy(ActivationCheckpointing.full, reason)
    usable = max(memory - RESERVED_BYTES, 0.0)
    estimates = ", ".join(f"{each} {peak / GIB:,.2f}" for each, peak in peaks.items())
    reason = f"of {usable / GIB:,.2f} GiB usable per rank the policies need an estimated {estimates}"
    return RecomputePolicy(fitting_policy(peaks, usable), reason)


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


def check_kernels(
    model: Prepared,
    cfg: ModelConfig,
    micro_batches: Callable[[int], Sequence[Batch]],
    run: Run | None = None,
    objective: TokenObjective = PLAIN,
) -> list[str]:
    """Print and return the attention kernel in use, and the loss with and without float8. Call it on all ranks.

    On a GPU, the installed kernels are timed first on a call of this run, and the fastest is used from now on. A
    resumed run uses the kernel of its checkpoint instead, so that its losses stay the same to the bit. The kernel is
    observed in a forward of one row of the first batch, in training mode and under the run's autocast; compiled layers
    run uncompiled in it. With float8, one micro-batch of every rank is evaluated in float8 and without. This detects
    wrong matmuls and models that do not tolerate eight bits from the start. It cannot detect errors that accumulate
    over many steps, and detects few in a model with random weights.

    Args:
        model: The prepared model, filled with weights.
        micro_batches: Function of a step's number (0, 1, ...) that returns this rank's micro-batches.
        run: Prints the lines on rank 0 and keeps the choice in its state; None: the lines are only returned.
        objective: The loss that is compared with float8.

    Raises ConfigError if the configured attention has no kernel here, or if the two losses differ by more than
    `model.float8_bound` (relative).
    """
    if cfg.attention == Attention.flex_attention and model.settings.device.type == "cpu":
        raise ConfigError(NO_FLEX_BACKWARD)
    first = micro_batches(0)[:1]
    lines = _choose_attention(model, cfg, first[0], TrainState() if run is None else run.state)
    if cfg.float8 != Float8.none:
        lines.append(_compare(model, cfg, first, objective))
    if run is not None:
        run.print(*lines)
    return lines


def _choose_attention(model: Prepared, cfg: ModelConfig, batch: Batch, state: TrainState) -> list[str]:
    """Return the lines about attention, after all ranks use the checkpoint's kernel or the fastest on rank 0."""
    # Imports transformers, which `components.training` alone must not.
    from components.models.attention import describe_attention

    observed, first = _observe_attention(model, cfg, batch)
    lines: list[str] = []
    if cfg.attention == Attention.sdpa and _can_measure(model.settings.device):
        from components.models import attention

        choice, saved = None, state.attention_kernel
        default = next((each.kernel for each in observed if not each.masked), "")
        if saved is not None and (saved == default or attention.is_usable(saved)):
            choice = [saved, f"attention kernel: {saved}, that of the checkpoint", default]
        elif this_rank() == 0 and first is not None and not any(each.dropout for each in observed):
            rates = attention.measure_kernels(attention.observed_call(*first), default)
            choice = [*attention.choose_kernel(rates, default), default]
        choice = broadcast_json(choice)
        if choice is not None:
            chosen, line, default = choice
            lines.append(line)
            state.attention_kernel = chosen
            if chosen != default:
                attention.use_kernel(chosen)
                observed, _ = _observe_attention(model, cfg, batch)
    return [describe_attention(model.module, cfg, observed, batch.document_bounds is not None), *lines]


def _can_measure(device: torch.device) -> bool:
    """Return whether kernels may be timed: only on GPUs and without run.deterministic."""
    return device.type == "cuda" and torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled()


@torch.no_grad()
def _observe_attention(
    model: Prepared, cfg: ModelConfig, batch: Batch
) -> tuple[list[ObservedAttention], tuple[Any, Any, dict[str, Any]] | None]:
    """Return the kinds of attention calls of all stages in one row's forward, and this rank's first without a mask."""
    from components.models.attention import AttentionProbe, ObservedAttention

    settings, pipeline = model.settings, model.pipeline
    row = local_batch(batch.select_rows(slice(1)).to(settings.device), settings)
    devices = [settings.device] if settings.device.type == "cuda" else []
    stages_apart = nullcontext() if pipeline is None else pipeline.stages_apart()
    problems: list[str] = []
    # The random state is restored, as dropout may draw from it. Compilation is off: a single row has a shape that no
    # training step has, which is not worth a compilation.
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), stages_apart:
        probe = AttentionProbe(flash_only=cfg.attention == Attention.sdpa_flash)
        try:
            with probe:
                forward_loss(model, row)
        except ConfigError as error:
            if pipeline is None:
                raise
            problems = error.problems
    observed = probe.observed
    if pipeline is not None:  # layers of other stages may use another kernel, or have none
        local = [{**asdict(each), "dtype": str(each.dtype).removeprefix("torch.")} for each in observed]
        stages = all_gather_json([problems, local], pipeline.group)
        if problems := [problem for of_stage, _ in stages for problem in of_stage]:
            raise ConfigError(list(dict.fromkeys(problems)))
        observed = [
            ObservedAttention(**{**each, "dtype": torch_dtype(each["dtype"])})
            for _, of_stage in stages
            for each in of_stage
        ]
        observed = list(dict.fromkeys(observed))
    return observed, probe.first


def _compare(model: Prepared, cfg: ModelConfig, batch: Sequence[Batch], objective: TokenObjective) -> str:
    with without_float8(model.module):
        plain = evaluate(model, batch, objective).loss
    float8 = evaluate(model, batch, objective)
    in_float8, units = float8.loss, f"{float8.count:,} {float8.unit}s"
    difference = abs(in_float8 - plain) / plain
    losses = f"{in_float8:.4f} in float8 and {plain:.4f} without over {units}, {difference:.2%} apart"
    key = f"model.float8={cfg.float8}"
    if not difference <= cfg.float8_bound:
        alternative = "model.float8=rowwise, " if cfg.float8 == Float8.tensorwise else ""
        raise ConfigError(
            f"{key}: the loss is {losses}, more than model.float8_bound={cfg.float8_bound:g}; set {alternative}"
            "model.float8=none, or a larger model.float8_bound"
        )
    emulated = ", emulated" if cfg.float8_emulate else ""
    return f"float8: {cfg.float8}{emulated}, {len(float8_layers(model.module))} linear layers; the loss is {losses}"
