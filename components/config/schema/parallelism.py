"""`parallelism`: the device mesh and how the model is sharded over it.

The mesh has six axes whose sizes multiply to the number of processes, in this order (tp innermost):

    world = pp x dp_replicate x dp_shard x ep x cp x tp

Flattened views: `dp` = dp_replicate x dp_shard x ep (ranks with different samples), `dp_cp` = dp x cp (over which
token counts, losses and gradients are summed), `fsdp` = dp_shard x ep x cp (over which dense parameters are sharded).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum

from components.protocol.errors import ConfigError, at_least, field_values, raise_all

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""The mesh axes, outermost first."""


class Strategy(StrEnum):
    """single: one process; ddp: replicated parameters; fsdp2: parameters sharded with FSDP2."""

    single = "single"
    ddp = "ddp"
    fsdp2 = "fsdp2"


PipelineSchedule = StrEnum(
    "PipelineSchedule",
    {
        "GPipe": "GPipe",
        "1F1B": "1F1B",
        "Interleaved1F1B": "Interleaved1F1B",
        "LoopedBFS": "LoopedBFS",
        "InterleavedZeroBubble": "InterleavedZeroBubble",
        "ZBVZeroBubble": "ZBVZeroBubble",
        "DualPipeV": "DualPipeV",
    },
)
"""Pipeline schedules, by torch's names.

GPipe: all forwards, then all backwards; most memory. 1F1B: each backward as early as possible. Interleaved1F1B,
LoopedBFS, InterleavedZeroBubble: several stages per rank; smaller bubble, more communication. ZBVZeroBubble,
DualPipeV: two stages per rank, assigned in a V, so that the first rank holds the first and the last stage.
"""

ONE_F_ONE_B = PipelineSchedule("1F1B")
"""Default schedule; a constant because 1F1B is no Python identifier."""

SINGLE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that assign the second half of the stages to the ranks in reverse order."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute input gradients and weight gradients separately."""


_SWITCH = ("true", "false", "auto")
"""Values of parallelism.defer_grad_sync and parallelism.reshard_after_forward."""


class ContextAttention(StrEnum):
    """Attention over a sequence that is sharded over cp.

    ulysses: all-to-all so that each rank holds all tokens of some heads (Jacobs et al. 2023); all_gather: all-gather
    keys and values, some heads at a time; auto: ulysses if cp divides the heads of a rank, else all_gather.
    """

    auto = "auto"
    ulysses = "ulysses"
    all_gather = "all_gather"


class ContextLinear(StrEnum):
    """Linear attention and Mamba-2 over a sequence that is sharded over cp.

    heads: all-to-all so that each rank holds all tokens of some heads; states: each rank computes its own tokens, from
    the state that the tokens before them leave; auto: heads if cp divides the heads of a rank, else states.
    """

    auto = "auto"
    heads = "heads"
    states = "states"


class UnevenHeads(StrEnum):
    """Behavior if tp does not divide the attention heads: replicate: every tp rank computes all heads; refuse:
    error."""

    replicate = "replicate"
    refuse = "refuse"


class ActivationCheckpointing(StrEnum):
    """Activations of a decoder layer that are recomputed in the backward instead of stored.

    none; selective: all but the outputs of matmuls and attention; full: all; alternate: all of every other layer;
    auto: the first of none, selective and full whose estimated memory fits the device.
    """

    none = "none"
    full = "full"
    selective = "selective"
    alternate = "alternate"
    auto = "auto"


def describe_processes(number: int) -> str:
    """Return `1 process`, `2 processes`, ..."""
    return f"{number} process{'' if number == 1 else 'es'}"


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Sizes of the six axes, none left to infer."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.ep * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel size: number of ranks with different samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    def degree(self, axis: str) -> int:
        """Return the size of an axis."""
        return field_values(self)[axis]

    def __str__(self) -> str:
        return " x ".join(f"{axis}={degree}" for axis, degree in asdict(self).items())

    @property
    def summary(self) -> str:
        """Axes larger than 1 and the number of processes: `dp_shard=2 x tp=2 = 4 processes`."""
        axes = " x ".join(f"{axis}={degree}" for axis, degree in asdict(self).items() if degree > 1)
        return f"{axes} = {describe_processes(self.world)}" if axes else describe_processes(self.world)


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """Sizes of the mesh axes, one of which may be -1 (inferred from the number of processes), and how they are used."""

    strategy: Strategy = Strategy.fsdp2
    """single (one process), ddp (replicated parameters) or fsdp2 (parameters sharded with FSDP2; required by pp,
    dp_shard, ep, cp and tp)."""
    pp: int = 1
    """Pipeline parallel: number of ranks that the layers are distributed over."""
    dp_replicate: int = 1
    """Data parallel: number of replicas of the parameters; gradients are all-reduced."""
    dp_shard: int = -1
    """Data parallel: number of shards of the parameters, which are all-gathered layer by layer."""
    ep: int = 1
    """Expert parallel: number of ranks that the experts of a mixture-of-experts model are distributed over."""
    cp: int = 1
    """Context parallel: number of ranks that each sequence is sharded over; seq_len must be a multiple of 2 x cp."""
    tp: int = 1
    """Tensor parallel: number of ranks that the matrices of a layer are sharded over."""
    pp_schedule: PipelineSchedule = ONE_F_ONE_B
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV.
    The last three split the backward, which excludes model.compile and selective activation checkpointing."""
    stages_per_rank: int = 2
    """Pipeline stages per rank, at least 2; ignored by GPipe and 1F1B (one stage per rank), must be 2 for ZBVZeroBubble
    and DualPipeV."""
    cp_attention: ContextAttention = ContextAttention.auto
    """Attention over cp: ulysses (all-to-all, cp must divide the heads of a rank), all_gather (of keys and values) or
    auto (ulysses if possible)."""
    cp_linear: ContextLinear = ContextLinear.auto
    """Linear attention and Mamba-2 over cp: heads (all-to-all, cp must divide the heads of a rank), states (passed on
    between ranks; less traffic for rows of more than about 200 x cp tokens per rank, a third more FLOPs) or auto
    (heads if possible)."""
    sequence_parallel: bool = False
    """Also shard activations between tensor-parallel layers along the sequence; requires tp > 1."""
    async_tp: bool = False
    """Split the all-gathers and reduce-scatters of sequence parallelism and the matmuls beside them into pieces that
    overlap, over symmetric memory; requires sequence_parallel and compiled layers on GPUs of one node."""
    uneven_heads: UnevenHeads = UnevenHeads.replicate
    """If tp does not divide the attention heads: replicate (every tp rank computes all heads) or refuse (error)."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    """Activations to recompute in the backward: none, selective (all but outputs of matmuls and attention), full,
    alternate (full, every other layer) or auto (the first of none, selective and full that fits the memory)."""
    activation_offload: bool = False
    """Copy what decoder layers save for the backward to host memory, and back one layer ahead: less device memory, more
    traffic between host and device. With activation_checkpointing=none, full, alternate or auto; requires a GPU."""
    defer_grad_sync: str = "auto"
    """Reduce gradients once per optimizer step instead of per micro-batch: less communication, but whole gradients in
    float32. true, false or auto (on a GPU, true if the estimated memory fits; elsewhere true)."""
    reshard_after_forward: str = "auto"
    """Free all-gathered parameters after the forward and gather them again in the backward: less memory, more
    communication. true, false (requires fsdp2) or auto (false under pp, where each micro-batch would gather again)."""
    prefetch: int = 0
    """Number of layers whose parameters are all-gathered ahead of the current one, in forward and backward (fsdp2):
    overlaps more communication, costs the memory of that many layers; 0: FSDP2's default, one layer if the host runs
    ahead of the device."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory: less device memory, slower; requires fsdp2 and
    pp=1."""
    tp_plan: str | None = None
    """Import path (package.module:name) of a custom tensor-parallel plan, a dict or a function that returns one; null:
    the model's plan."""

    def __post_init__(self) -> None:
        self.defer_grad_sync = str(self.defer_grad_sync).lower()  # YAML's true and false become True and False
        self.reshard_after_forward = str(self.reshard_after_forward).lower()
        problems = [
            f"parallelism.{axis}={self.degree(axis)}: must be at least 1, or -1 to infer it"
            for axis in AXES
            if self.degree(axis) < 1 and self.degree(axis) != -1
        ]
        inferred = [axis for axis in AXES if self.degree(axis) == -1]
        if len(inferred) > 1:
            keys = " and ".join(f"parallelism.{axis}=-1" for axis in inferred)
            problems.append(f"{keys}: only one axis can be inferred; set the others to a number")
        problems += self._strategy_problems()
        if self.stages_per_rank < 2 or (self.pp_schedule in V_SHAPED and self.stages_per_rank != 2):
            problems.append(
                f"parallelism.stages_per_rank={self.stages_per_rank}: must be at least 2, and 2 for ZBVZeroBubble and "
                "DualPipeV; set parallelism.stages_per_rank=2, or remove it (1F1B and GPipe have one stage per rank)"
            )
        if self.sequence_parallel and self.tp == 1:
            problems.append("parallelism.sequence_parallel=true: needs parallelism.tp > 1")
        if self.async_tp and not self.sequence_parallel:
            problems.append(
                "parallelism.async_tp=true: overlaps the all-gathers and reduce-scatters of sequence parallelism in "
                "compiled layers; set parallelism.sequence_parallel=true and model.compile=true, or "
                "parallelism.async_tp=false"
            )
        if self.cpu_offload and self.strategy != Strategy.fsdp2:
            problems.append(
                f"parallelism.cpu_offload=true: only fsdp2 can offload, not parallelism.strategy={self.strategy}; set "
                "parallelism.cpu_offload=false, or parallelism.strategy=fsdp2"
            )
        if self.cpu_offload and self.pp > 1:
            problems.append(
                "parallelism.cpu_offload=true: pipeline stages exchange tied embeddings on the device; set "
                f"parallelism.pp=1, not {self.pp}, or parallelism.cpu_offload=false"
            )
        problems += at_least("parallelism.prefetch", self.prefetch, 0)
        if self.tp_plan is not None and not _is_import_path(self.tp_plan):
            problems.append(
                f"parallelism.tp_plan={self.tp_plan}: is not an import path; write package.module:name, or null "
                "for the model's own plan"
            )
        for key in ("defer_grad_sync", "reshard_after_forward"):
            if (value := field_values(self)[key]) not in _SWITCH:
                problems.append(f"parallelism.{key}={value}: must be {', '.join(_SWITCH[:-1])} or {_SWITCH[-1]}")
        if self.reshard_after_forward == "false" and self.strategy != Strategy.fsdp2:
            problems.append(
                "parallelism.reshard_after_forward=false: only fsdp2 gathers and frees parameters, not "
                f"parallelism.strategy={self.strategy}; set parallelism.reshard_after_forward=auto, or "
                "parallelism.strategy=fsdp2"
            )
        if self.prefetch > 0 and self.strategy != Strategy.fsdp2:
            problems.append(
                f"parallelism.prefetch={self.prefetch}: only fsdp2 gathers parameters, not parallelism.strategy="
                f"{self.strategy}; set parallelism.prefetch=0, or parallelism.strategy=fsdp2"
            )
        raise_all(problems)

    def degree(self, axis: str) -> int:
        """Return the configured size of an axis; -1 if it is to be inferred."""
        return field_values(self)[axis]

    def sequence_multiple(self, mesh: MeshShape) -> int:
        """Return the number of tokens of which each row length must be a multiple, so that it can be sharded evenly.

        cp splits a row into 2 x cp chunks, two per rank; sequence parallel splits the tokens of a cp rank over tp.
        """
        return mesh.cp * math.lcm(2 if mesh.cp > 1 else 1, mesh.tp if self.sequence_parallel else 1)

    @property
    def defers_grad_sync(self) -> bool:
        """Whether gradients are reduced once per optimizer step; auto counts as true until it is resolved."""
        return self.defer_grad_sync != "false"

    def reshards_after_forward(self, pp: int) -> bool:
        """Whether FSDP2 frees parameters after a forward.

        A split backward computes weight gradients later, from parameters that must still be unsharded then.
        """
        if pp > 1 and self.pp_schedule in SPLIT_BACKWARD:
            return False
        return pp == 1 if self.reshard_after_forward == "auto" else self.reshard_after_forward == "true"

    def stage_ranks(self, pp: int) -> list[int]:
        """Return the pp rank of each pipeline stage, in the order of the stages."""
        if pp == 1 or self.pp_schedule in SINGLE_STAGE:
            return list(range(pp))
        if self.pp_schedule in V_SHAPED:
            return [*range(pp), *reversed(range(pp))]
        return list(range(pp)) * self.stages_per_rank

    def _strategy_problems(self) -> list[str]:
        replicating = {
            Strategy.single: (),
            Strategy.ddp: ("dp_replicate",),
        }
        if self.strategy not in replicating:
            return []
        return [
            f"parallelism.{axis}={self.degree(axis)}: strategy {self.strategy} has no such axis; set "
            f"parallelism={self.strategy}, or parallelism.strategy=fsdp2"
            if axis == "dp_shard"
            else f"parallelism.{axis}={self.degree(axis)}: strategy {self.strategy} has no such axis; set "
            f"parallelism.{axis}=1, or parallelism.strategy=fsdp2 (with parallelism.dp_shard=1 it replicates)"
            for axis in AXES
            if self.degree(axis) != 1 and axis not in replicating[self.strategy]
        ]

    def resolve(self, world_size: int) -> MeshShape:
        """Return the axis sizes for `world_size` processes, with -1 replaced.

        Raises ConfigError if they cannot multiply to `world_size`.
        """
        stated = {axis: self.degree(axis) for axis in AXES}
        inferred = [axis for axis, degree in stated.items() if degree == -1]
        product = math.prod(degree for degree in stated.values() if degree != -1)
        formula = " x ".join(f"{axis} {degree}" for axis, degree in stated.items() if degree not in (1, -1)) or "1"
        if inferred:
            if world_size % product:
                raise ConfigError(
                    f"parallelism: {world_size} processes cannot be divided by {formula} = {product} to infer "
                    f"parallelism.{inferred[0]}; change a degree or cluster.procs_per_node"
                )
            stated[inferred[0]] = world_size // product
        elif product != world_size:
            raise ConfigError(
                f"parallelism: {formula} = {describe_processes(product)}, but there are {world_size}; change a degree, "
                f"set one to -1, or make cluster.nodes x cluster.procs_per_node={product}"
            )
        return MeshShape(**stated)


def _is_import_path(path: str) -> bool:
    """Return whether `path` has the form package.module:name or package.module.Name."""
    module, colon, name = path.partition(":")
    parts = [*module.split("."), *(name.split(".") if colon else ())]
    return len(parts) > 1 and all(part.isidentifier() for part in parts)
