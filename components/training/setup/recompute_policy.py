"""Which activation checkpointing `auto` stands for: the least recomputation whose estimated memory fits the device."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from components.config.schema.parallelism import SPLIT_BACKWARD, ActivationCheckpointing, ParallelismConfig, Strategy
from components.config.schema.training import TrainingConfig
from components.distributed.expert import experts_modules
from components.distributed.init import get_local_world_size_preinit
from components.distributed.mesh import Mesh
from components.models.activations import layer_bytes
from components.models.anatomy import Anatomy, read_anatomy
from components.training.objectives.chunked_loss import chunk_tokens
from components.training.optimizers.gradients import local_part

USABLE = 0.9
"""Part of a device's memory that the estimate may fill: the rest is for what it does not know."""
PREFERRED = (ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What is recomputed, and why where that was not asked for."""

    policy: ActivationCheckpointing
    why: str = ""

    def __bool__(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        return f"activation checkpointing: {self.policy}, {self.why}"


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What decides on the memory of a step besides the model."""

    training: TrainingConfig
    """Sizes of the batch."""
    parallelism: ParallelismConfig
    """How the model is sharded, and which policy was asked for."""
    compiles: bool = False
    """Whether decoder layers are compiled."""


def choose_checkpointing(
    model: nn.Module,
    load: StepLoad,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    memory: int | None = None,
    anatomy: Anatomy | None = None,
) -> Checkpointing:
    """Return the policy that is asked for, or what `auto` stands for. A collective: call it after sharding.

    Args:
        memory: Bytes that a rank may use; None: those of its GPU, or its share of the host's.
        anatomy: The whole model's; None: read it.
    """
    asked = load.parallelism.activation_checkpointing
    if asked != ActivationCheckpointing.auto:
        return Checkpointing(asked)
    split = mesh.size("pp") > 1 and load.parallelism.pp_schedule in SPLIT_BACKWARD
    possible = [each for each in PREFERRED if each != ActivationCheckpointing.selective or not (split or load.compiles)]
    memory = _memory(device) if memory is None else memory
    try:
        needs = estimate(model, load, mesh, device, compute_dtype, anatomy)
        shares, why = [needs[each] / memory for each in possible], ""
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        shares, why = [math.inf] * len(possible), next(iter(str(error).splitlines()), type(error).__name__)
    shares = _worst_of_ranks(shares, device)  # a rank that could not estimate takes part too: the others wait for it
    if math.isinf(shares[0]):
        why = why or "another rank could not"
        return Checkpointing(ActivationCheckpointing.full, f"as its memory cannot be estimated: {why}")
    found = next((index for index, share in enumerate(shares) if share <= USABLE), len(possible) - 1)
    told = ", ".join(f"{each} {share:.0%}" for each, share in zip(possible, shares, strict=True))
    return Checkpointing(possible[found], f"estimated part of {memory / 2**30:,.1f} GiB a rank: {told}")


def estimate(
    model: nn.Module,
    load: StepLoad,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> dict[ActivationCheckpointing, int]:
    """Return the bytes of this rank at the peak of a step by policy: state, what is gathered, activations, the loss."""
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
    ordered = str(parallelism.pp_schedule) in ("GPipe", "LoopedBFS")  # all forwards first
    in_flight = 1 if pp == 1 else accumulation if ordered else min(accumulation, 2 * pp)
    words, tokens = -(-anatomy.vocabulary // tp), training.micro_batch_size * seq
    loss = 12 * min(tokens, chunk_tokens(words, device)) * words + 4 * words * anatomy.hidden_size
    fixed = _state_bytes(model) + _gathered_bytes(model, layers, load, mesh, compute_dtype, accumulation) + loss
    return {each: fixed + layer.of(each, -(-len(layers) // pp), in_flight) for each in PREFERRED}


def _state_bytes(model: nn.Module) -> int:
    """Parameters, gradients and two moments of those that are trained."""
    return sum(
        local_part(each).numel() * each.element_size() * (4 if each.requires_grad else 1) for each in model.parameters()
    )


def _gathered_bytes(
    model: nn.Module,
    decoder_layers: list[nn.Module],
    load: StepLoad,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    accumulation: int,
) -> int:
    """What is held besides the shards: parameters in the type of the products, gradients that wait for their sum."""
    stored = next(each.dtype for each in model.parameters() if each.is_floating_point())
    shards = _shards(model, load, mesh)
    whole, gradients = _gathered(model, compute_dtype, shards)
    if load.parallelism.strategy != Strategy.fsdp2:
        return 0 if compute_dtype == stored else whole
    stack = [_gathered(layer, compute_dtype, shards) for layer in decoder_layers]
    layers = max(1, sum(bytes_ > 0 for bytes_, _ in stack))
    in_layers, of_layers = (sum(each) for each in zip(*stack, strict=True))
    held = 2 * in_layers // layers + whole - in_layers if load.parallelism.reshard_after_forward else whole
    waiting = gradients if accumulation > 1 and load.parallelism.defer_grad_sync else 2 * of_layers // layers
    return held + waiting


def _shards(model: nn.Module, load: StepLoad, mesh: Mesh) -> dict[nn.Parameter, int]:
    """Return of how many ranks' parts each parameter is put together; an expert's are on fewer ranks than the rest."""
    if load.parallelism.strategy != Strategy.fsdp2:
        return dict.fromkeys(model.parameters(), 1)
    experts = [each for module in experts_modules(model).values() for each in module.parameters()]
    return dict.fromkeys(model.parameters(), mesh.size("fsdp")) | dict.fromkeys(experts, mesh.size("efsdp"))


def _gathered(module: nn.Module, dtype: torch.dtype, shards: dict[nn.Parameter, int]) -> tuple[int, int]:
    """Bytes of the gathered parameters in the type of the products, and of the gradients of those that are trained.

    Packed weights stay bytes.
    """
    wholes = [(local_part(each).numel() * shards[each], each) for each in module.parameters()]
    held = sum(size * (dtype.itemsize if each.is_floating_point() else 1) for size, each in wholes)
    return held, sum(size * max(4, dtype.itemsize) for size, each in wholes if each.requires_grad)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, get_local_world_size_preinit())


def _worst_of_ranks(shares: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return shares
    worst = torch.tensor(shares, dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()
