"""`parallelism`: the device mesh and how a model is laid over it.

The mesh has six axes, each a factor of the number of processes, in this order (tp innermost):

    world = pp x dp_replicate x dp_shard x ep x cp x tp

Flattened views: `dp` = dp_replicate x dp_shard x ep (ranks that see different samples), `dp_cp` = dp x cp (where
token counts, losses and gradients are summed), `fsdp` = dp_shard x ep x cp (what dense parameters shard over).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum

from components.config.errors import ConfigError
from components.config.schema.checks import at_least, field_values, raise_all

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""The mesh axes, outermost first."""


class Strategy(StrEnum):
    """single: one process; ddp: replicate; fsdp2: shard with FSDP2."""

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
"""Orders of forwards and backwards over pipeline stages, by torch's names.

GPipe: all forwards, then all backwards: most memory. 1F1B: a backward as soon as there is one. Interleaved1F1B,
LoopedBFS, InterleavedZeroBubble: several stages per rank, shorter idle times, more traffic. ZBVZeroBubble, DualPipeV:
two stages per rank that lie on the ranks as a V, so that one rank holds the first and the last.
"""

ONE_F_ONE_B = PipelineSchedule("1F1B")
"""The default."""

SINGLE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose second half of the stages runs back over the ranks."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute the gradients of inputs and of weights apart."""


class ContextAttention(StrEnum):
    """How the ranks of the cp axis attend to one another's part of the sequence.

    ulysses: an all-to-all gives each rank all tokens of some heads (Jacobs et al. 2023); all_gather: each rank gathers
    keys and values, some heads at a time; auto: ulysses where cp divides the heads that a rank has, else all_gather.
    """

    auto = "auto"
    ulysses = "ulysses"
    all_gather = "all_gather"


class UnevenHeads(StrEnum):
    """What happens where tp does not divide the attention heads."""

    replicate = "replicate"
    refuse = "refuse"


class ActivationCheckpointing(StrEnum):
    """What of a decoder layer is computed again in the backward instead of being kept.

    none; selective: all but matrix products and attention; full: everything; alternate: everything of every other
    layer; auto: none, selective or full, the first whose estimated memory fits the device.
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
    """Degrees of the six axes with nothing left to infer."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return math.prod(asdict(self).values())

    @property
    def dp(self) -> int:
        """Processes that see different samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    def degree(self, axis: str) -> int:
        """Return the degree of an axis."""
        return field_values(self)[axis]

    def __str__(self) -> str:
        return " x ".join(f"{axis}={degree}" for axis, degree in asdict(self).items())

    @property
    def summary(self) -> str:
        """The axes larger than 1, and the number of processes: `dp_shard=2 x tp=2 = 4 processes`."""
        axes = " x ".join(f"{axis}={degree}" for axis, degree in asdict(self).items() if degree > 1)
        return f"{axes} = {describe_processes(self.world)}" if axes else describe_processes(self.world)


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """Degrees of the mesh axes (one may be -1: what is left of the processes), and how the model uses them."""

    strategy: Strategy = Strategy.fsdp2
    """single, ddp or fsdp2."""
    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Replicas of the parameters: data parallel, gradients all-reduced."""
    dp_shard: int = -1
    """Shards of the parameters: data parallel, parameters gathered layer by layer."""
    ep: int = 1
    """Shards of the experts of a mixture-of-experts model."""
    cp: int = 1
    """Shards of the sequence: each rank computes its part of every row."""
    tp: int = 1
    """Shards of the matrices within a layer."""
    pp_schedule: PipelineSchedule = ONE_F_ONE_B
    """Order of the micro-batches over the pipeline stages."""
    stages_per_rank: int = 2
    """Pipeline stages of each rank under a schedule that has several (two under the V schedules)."""
    cp_attention: ContextAttention = ContextAttention.auto
    """auto, ulysses or all_gather."""
    sequence_parallel: bool = False
    """Shard the activations between the tp regions along the sequence; needs tp > 1."""
    uneven_heads: UnevenHeads = UnevenHeads.replicate
    """replicate: attention is computed by every tp rank where tp does not divide the heads; refuse: an error."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    """none, selective, full, alternate or auto."""
    defer_grad_sync: bool = True
    """Reduce gradients once per optimizer step instead of once per micro-batch: less traffic, more memory."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward and gather them again for the backward: less memory, more traffic."""
    prefetch: int = 0
    """Layers whose parameters are gathered ahead of the one at work, in forward and backward: hides traffic, takes the
    memory of as many layers (fsdp2); 0: FSDP2's own order, one ahead where the host is fast enough."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (fsdp2)."""
    tp_plan: str | None = None
    """Import path of a tp plan, module.path:name: a dict, or a function that returns one; null: the model's own."""

    def __post_init__(self) -> None:
        problems = [
            f"parallelism.{axis}={self.degree(axis)}: must be 1 or more, or -1 to take what is left"
            for axis in AXES
            if self.degree(axis) < 1 and self.degree(axis) != -1
        ]
        inferred = [axis for axis in AXES if self.degree(axis) == -1]
        if len(inferred) > 1:
            keys = " and ".join(f"parallelism.{axis}=-1" for axis in inferred)
            problems.append(f"{keys}: only one axis can take what is left; give the others a number")
        problems += self._strategy_problems()
        if self.stages_per_rank < 2 or (self.pp_schedule in V_SHAPED and self.stages_per_rank != 2):
            problems.append(
                f"parallelism.stages_per_rank={self.stages_per_rank}: must be 2 or more, and 2 under a V schedule; for "
                "one stage per rank choose parallelism.pp_schedule=1F1B or GPipe"
            )
        if self.sequence_parallel and self.tp == 1:
            problems.append("parallelism.sequence_parallel=true: needs parallelism.tp > 1")
        if self.cpu_offload and self.strategy != Strategy.fsdp2:
            problems.append(
                f"parallelism.cpu_offload=true: only fsdp2 can offload; parallelism.strategy={self.strategy}"
            )
        if self.cpu_offload and self.pp > 1:
            problems.append(
                f"parallelism.cpu_offload=true: stages exchange their embedding on the device; set parallelism.pp=1, "
                f"not {self.pp}, or parallelism.cpu_offload=false"
            )
        problems += at_least("parallelism.prefetch", self.prefetch, 0)
        if self.tp_plan is not None and not _is_import_path(self.tp_plan):
            problems.append(
                f"parallelism.tp_plan={self.tp_plan}: is not an import path; write package.module:name, or null "
                "for the model's own plan"
            )
        if not self.reshard_after_forward and self.strategy != Strategy.fsdp2:
            problems.append(
                "parallelism.reshard_after_forward=false: only fsdp2 gathers parameters and frees them; set it "
                f"to true, or another strategy than parallelism.strategy={self.strategy}"
            )
        if self.prefetch > 0 and self.strategy != Strategy.fsdp2:
            problems.append(
                f"parallelism.prefetch={self.prefetch}: only fsdp2 gathers parameters; set parallelism.prefetch=0, or "
                f"another strategy than parallelism.strategy={self.strategy}"
            )
        raise_all(problems)

    def degree(self, axis: str) -> int:
        """The stated degree of an axis; -1 where it is to be inferred."""
        return field_values(self)[axis]

    def sequence_multiple(self, mesh: MeshShape) -> int:
        """Rows are padded to a multiple of this many tokens, so that cp and sequence parallel can cut them evenly.

        cp cuts a row into 2 x cp chunks, two for each rank; sequence parallel cuts what a rank of cp holds into tp.
        """
        return mesh.cp * math.lcm(2 if mesh.cp > 1 else 1, mesh.tp if self.sequence_parallel else 1)

    def stage_places(self, pp: int) -> list[int]:
        """Return which place on the pp axis holds each pipeline stage, first stage first."""
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
            f"parallelism.{axis}=1, or parallelism.strategy=fsdp2 (with dp_shard=1 it replicates)"
            for axis in AXES
            if self.degree(axis) != 1 and axis not in replicating[self.strategy]
        ]

    def resolve(self, world_size: int) -> MeshShape:
        """Return the degrees for `world_size` processes, the -1 filled in.

        Raises ConfigError where their product cannot be `world_size`.
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
    """Whether `path` has the form package.module:name or package.module.Name."""
    module, colon, name = path.partition(":")
    parts = [*module.split("."), *(name.split(".") if colon else ())]
    return len(parts) > 1 and all(part.isidentifier() for part in parts)
