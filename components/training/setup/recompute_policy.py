"""Choice of the activation-checkpointing policy for `auto`: the least recomputation that fits the device's memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from components.config.schema.optimizer import AdamW8bitConfig, OptimizerConfig
from components.config.schema.parallelism import SPLIT_BACKWARD, ActivationCheckpointing, ParallelismConfig, Strategy
from components.config.schema.training import TrainingConfig
from components.distributed.expert import experts_modules
from components.distributed.init import get_local_world_size_preinit
from components.distributed.mesh import Mesh
from components.models.activations import layer_bytes
from components.models.anatomy import Anatomy, read_anatomy
from components.training.objectives.chunked_loss import chunk_tokens
from components.training.optimizers.adamw8bit import is_quantized, moment_bytes
from components.training.optimizers.gradients import local_tensor

USABLE = 0.9
"""Share of a device's memory that the estimate may fill; the rest covers what it leaves out."""
PREFERRED = (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full)
"""Policies from the least to the most recomputation."""


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
class StepLoad:
    """Settings besides the model that determine a step's memory."""

    training: TrainingConfig
    """Batch sizes and sequence length."""
    parallelism: ParallelismConfig
    """Sharding of the model, and the configured policy."""
    compiles: bool = False
    """Whether decoder layers are compiled."""
    frozen_bytes: int = 0
    """Bytes of this rank's weights of a second model, which is not trained: a teacher or a reference."""
    labels: int = 0
    """Outputs of the score head; 0: the model has an LM head."""
    optimizer: OptimizerConfig | None = None
    """Optimizer, whose state counts as two moments of the weights' dtype unless they have 8 bits; None: AdamW."""


def choose_recompute_policy(
    model: nn.Module,
    load: StepLoad,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    memory: int | None = None,
    anatomy: Anatomy | None = None,
) -> RecomputePolicy:
    """Return the configured policy, or the one that `auto` resolves to. A collective: call it after sharding.

    Args:
        memory: Bytes available to a rank; None: the memory of its GPU, or its share of the host's.
        anatomy: Anatomy of the whole model; None: read it.
    """
    configured = load.parallelism.activation_checkpointing
    if configured != ActivationCheckpointing.auto:
        return RecomputePolicy(configured)
    split = mesh.size("pp") > 1 and load.parallelism.pp_schedule in SPLIT_BACKWARD
    possible = [each for each in PREFERRED if each != ActivationCheckpointing.selective or not (split or load.compiles)]
    memory = _available_memory(device) if memory is None else memory
    try:
        needs = estimate(model, load, mesh, device, compute_dtype, anatomy)
        shares, why = [needs[each] / memory for each in possible], ""
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        shares, why = [math.inf] * len(possible), next(iter(str(error).splitlines()), type(error).__name__)
    shares = _max_over_ranks(shares, device)  # a collective: ranks whose estimate failed take part with infinity
    if math.isinf(shares[0]):
        why = why or "the estimate failed on another rank"
        return RecomputePolicy(ActivationCheckpointing.full, f"because the memory of a step cannot be estimated: {why}")
    chosen = next((index for index, share in enumerate(shares) if share <= USABLE), len(possible) - 1)
    estimates = ", ".join(f"{each} {share:.0%}" for each, share in zip(possible, shares, strict=True))
    return RecomputePolicy(possible[chosen], f"estimated share of {memory / 2**30:,.1f} GiB per rank: {estimates}")


def estimate(
    model: nn.Module,
    load: StepLoad,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> dict[ActivationCheckpointing, int]:
    """Return this rank's estimated peak bytes of a step for each policy.

    The sum of sharded state (parameters, gradients, Adam moments, averaged weights, the weights of a model that is not
    trained), gathered parameters and unreduced gradients, activations, and the loss.
    """
    parallelism, training = load.parallelism, load.training
    anatomy = anatomy or read_anatomy(model)
    layers = list(anatomy.decoder_layers(model).values())
    accumulation = training.global_batch_size // (training.micro_batch_size * mesh.size("dp"))
    seq, tp, pp = training.seq_len // mesh.size("cp"), mesh.size("tp"), mesh.size("pp")
    layer = layer_bytes(
        model,  # type: ignore[arg-type]
        training.micro_batch_size,
        seq,
        compute_dtype,
        tp,
        parallelism.sequence_parallel,
    )
    forwards_first = str(parallelism.pp_schedule) in ("GPipe", "LoopedBFS")  # all forwards precede the first backward
    in_flight = 1 if pp == 1 else accumulation if forwards_first else min(accumulation, 2 * pp)
    vocabulary, tokens = -(-anatomy.vocabulary // tp), training.micro_batch_size * seq
    # A chunk's logits, log-probabilities and gradient, and the gradient of the head's weight, all in float32.
    loss = 12 * min(tokens, chunk_tokens(vocabulary, device)) * vocabulary + 4 * vocabulary * anatomy.hidden_size
    if load.labels:  # a score head has no chunks, and its few outputs are the same on all tp ranks
        loss = 12 * tokens * load.labels + 4 * load.labels * anatomy.hidden_size
    state = _state_bytes(model, load.optimizer, averages=training.ema_decay is not None) + load.frozen_bytes
    fixed = state + _gathered_bytes(model, layers, load, mesh, compute_dtype, accumulation) + loss
    return {each: fixed + layer.of(each, -(-len(layers) // pp), in_flight) for each in PREFERRED}


def _state_bytes(model: nn.Module, optimizer: OptimizerConfig | None, *, averages: bool) -> int:
    """Return the bytes of this rank's parameters, and of what the trained ones add: gradients, two Adam moments, and
    with `averages` their average in float32 or wider."""
    total = 0.0
    for each in model.parameters():
        size = each.element_size()
        eight_bit = isinstance(optimizer, AdamW8bitConfig) and is_quantized(each)
        moments = moment_bytes(each) if eight_bit else 2 * size
        trained = size + moments + (max(4, size) if averages else 0)
        total += local_tensor(each).numel() * (size + trained * each.requires_grad)
    return int(total)


def _gathered_bytes(
    model: nn.Module,
    decoder_layers: list[nn.Module],
    load: StepLoad,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    accumulation: int,
) -> int:
    """Return the bytes held besides the shards: parameters in the compute dtype and unreduced gradients.

    With reshard_after_forward at most two layers are gathered at once, one of them prefetched, plus everything outside
    of layers. Gradients of all layers accumulate unreduced if their reduction is deferred, else those of two layers.
    """
    stored = next(each.dtype for each in model.parameters() if each.is_floating_point())
    shards = _shards(model, load, mesh)
    params, grads = _gathered(model, compute_dtype, shards)
    if load.parallelism.strategy != Strategy.fsdp2:
        return 0 if compute_dtype == stored else params
    stack = [_gathered(layer, compute_dtype, shards) for layer in decoder_layers]
    layers = max(1, sum(bytes_ > 0 for bytes_, _ in stack))
    layer_params, layer_grads = (sum(each) for each in zip(*stack, strict=True))
    gathered = 2 * layer_params // layers + params - layer_params if load.parallelism.reshard_after_forward else params
    unreduced = grads if accumulation > 1 and load.parallelism.defer_grad_sync else 2 * layer_grads // layers
    return gathered + unreduced


def _shards(model: nn.Module, load: StepLoad, mesh: Mesh) -> dict[nn.Parameter, int]:
    """Return the number of FSDP shards of each parameter; experts are sharded over fewer ranks than the rest."""
    if load.parallelism.strategy != Strategy.fsdp2:
        return dict.fromkeys(model.parameters(), 1)
    experts = [each for module in experts_modules(model).values() for each in module.parameters()]
    return dict.fromkeys(model.parameters(), mesh.size("fsdp")) | dict.fromkeys(experts, mesh.size("efsdp"))


def _gathered(module: nn.Module, dtype: torch.dtype, shards: dict[nn.Parameter, int]) -> tuple[int, int]:
    """Return the bytes of the gathered parameters in the compute dtype, and of the gradients of the trained ones.

    Quantized weights are gathered as packed bytes.
    """
    sizes = [(local_tensor(each).numel() * shards[each], each) for each in module.parameters()]
    parameters = sum(size * (dtype.itemsize if each.is_floating_point() else 1) for size, each in sizes)
    return parameters, sum(size * max(4, dtype.itemsize) for size, each in sizes if each.requires_grad)


def _available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, get_local_world_size_preinit())


def _max_over_ranks(shares: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return shares
    worst = torch.tensor(shares, dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()
