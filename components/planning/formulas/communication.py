"""Time of collectives: process groups on their links, what the axes of a mesh send, and what computation hides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from components.config.schema.model import Float8
from components.config.schema.parallelism import ContextLinear, MeshShape, Strategy
from components.config.shape import AttentionLayout, local_heads
from components.planning.formulas.architecture import Sharding, Weight
from components.planning.formulas.families import LayerKind
from components.planning.formulas.hardware import Hardware, LayerWork, NodeLinks, uses_ulysses
from components.planning.formulas.workload import Implementation, Workload

_OVERLAP_LOSS = 0.5
"""Seconds by which computation slows down per second of communication beside it: collectives occupy multiprocessors and
memory bandwidth. Estimate: 0.3 or 0.7 would change no prediction of scripts/benchmark/published_points.csv by more than
7 %."""


_ASYNC_TP_OVERLAP = 0.75
"""Share of a layer's tp collectives that parallelism.async_tp overlaps with matmuls: torch 2.13 fuses all of the
forward, and the all-gathers of the backward."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, and the speed of their slowest link."""

    size: int
    local: int
    """Ranks of the group in one node."""
    bandwidth: float
    """Bytes/s of a rank in a ring over the group."""
    latency: float
    """Seconds of a collective of no bytes."""

    def all_gather(self, size: float) -> float:
        """Return the seconds to all-gather or reduce-scatter a tensor of `size` bytes, counted unsharded."""
        return size * (self.size - 1) / self.size / self.bandwidth + self.latency if self.size > 1 else 0.0

    def all_reduce(self, size: float) -> float:
        """Return the seconds to all-reduce `size` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(size)


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """Process groups of the axes of a mesh, whose ranks fill node after node, tp innermost."""

    tp: Group
    cp: Group
    ep: Group
    fsdp: Group
    """dp_shard x ep x cp: shards of dense parameters."""
    expert_fsdp: Group
    """dp_shard x cp: shards of experts."""
    replicas: Group
    """dp_replicate."""


def mesh_groups(mesh: MeshShape, hardware: Hardware) -> MeshGroups:
    """Return the groups of a mesh on nodes of `hardware.gpus_per_node` GPUs."""
    inner = mesh.cp * mesh.tp
    local = _local_ranks(mesh.cp, mesh.tp, hardware) * _local_ranks(mesh.dp_shard, mesh.ep * inner, hardware)
    return MeshGroups(
        tp=_group(mesh.tp, 1, hardware),
        cp=_group(mesh.cp, mesh.tp, hardware),
        ep=_group(mesh.ep, inner, hardware),
        fsdp=_group(mesh.dp_shard * mesh.ep * mesh.cp, mesh.tp, hardware),
        expert_fsdp=_group_of(mesh.dp_shard * mesh.cp, local, hardware),
        replicas=_group(mesh.dp_replicate, mesh.dp_shard * mesh.ep * inner, hardware),
    )


def link_bandwidth(stride: int, hardware: Hardware) -> float:
    """Return the bytes/s between a rank and the one `stride` further: within its node if it fits there."""
    if stride < hardware.gpus_per_node:
        return _node_bandwidth(2, hardware)
    return hardware.network_bandwidth * hardware.network_share


def _tp_work(workload: Workload, kind: LayerKind, group: Group, implementation: Implementation) -> LayerWork:
    """Return the tp collectives of a layer: hidden states gathered before, and summed after attention and the MLP."""
    architecture, tokens = workload.architecture, workload.local_tokens
    size = float(tokens * architecture.hidden * workload.compute_bytes)
    tp, linear = workload.mesh.tp, architecture.linear
    divided = kind.attends and architecture.attention(kind, tp) is not AttentionLayout.replicated
    divided = divided or (kind.is_linear and linear is not None and linear.local(tp) is not linear)
    sums = int(divided) + int(kind.has_mlp)
    gathers = implementation.tp_gathers * sums / 2
    if kind.has_experts:  # each tp rank dispatches a share of the tokens; the results are gathered
        gathers += 1
    gathered = (
        size / workload.compute_bytes if implementation.float8_gathers and workload.float8 is not Float8.none else size
    )
    pass_seconds = gathers * group.all_gather(gathered) + sums * group.all_gather(size)
    overlap = max(implementation.tp_overlap, _ASYNC_TP_OVERLAP * workload.parallelism.async_tp)
    exposed = pass_seconds * (1 - overlap) + pass_seconds * overlap * _OVERLAP_LOSS
    skips_last = not workload.compiled or implementation.compiles_recomputation
    again = (gathers + sums - skips_last) / (gathers + sums) if gathers + sums else 0.0
    return LayerWork(
        "tp communication",
        exposed,
        exposed,
        _repeats(workload) * again * exposed,
        f"{gathers + sums:g} gathers or scatters of {size:.4g} B over {group.size} / {group.bandwidth:.3g} B/s",
        _source(group),
    )


def _cp_work(workload: Workload, kind: LayerKind, group: Group, implementation: Implementation) -> LayerWork:
    """Return the cp collectives of a layer's attention, or of its recurrence: of tokens for heads, or of states."""
    architecture, mesh = workload.architecture, workload.mesh
    linear = None if architecture.linear is None else architecture.linear.local(mesh.tp)
    heads, kv_heads = local_heads(*architecture.heads_of(kind)[:2], mesh.tp)
    row = workload.local_tokens * sum(architecture.score_widths(kind)) // 2 * workload.compute_bytes
    if kind.is_linear and linear is not None:
        by_states = workload.parallelism.cp_linear is ContextLinear.states or linear.values % mesh.cp
        row, values = workload.local_tokens * workload.compute_bytes, linear.values * linear.value_width
        states = 8 * linear.state * workload.micro_batch * mesh.cp  # with the maps that pass them on, in float32
        size = float(states if by_states else row * (linear.convolved + values))
        seconds = group.all_gather(size) + group.latency
        detail = f"{'states' if by_states else '2 all-to-alls'} of {size:.4g} B together"
    elif implementation.ring_attention or not uses_ulysses(workload, kind):
        size = float(row * 2 * kv_heads * mesh.cp)
        seconds, detail = group.all_gather(size), f"keys and values of {size:.4g} B all-gathered"
    else:
        # An all-to-all leaves a rank with (n - 1) / n of its tensor, like a gather of a tensor of that size.
        size = float(row * (2 * heads + 2 * max(kv_heads, mesh.cp)))
        seconds, detail = group.all_gather(size) + group.latency, f"2 all-to-alls of {size:.4g} B together"
    return LayerWork(
        "cp communication",
        seconds,
        seconds,
        _repeats(workload) * seconds,
        f"{detail} over {group.size} / {group.bandwidth:.3g} B/s",
        _source(group),
    )


def _ep_work(workload: Workload, group: Group, hardware: Hardware, implementation: Implementation) -> LayerWork:
    """Return the all-to-alls of a layer's experts: tokens to their experts, results back."""
    architecture = workload.architecture
    tokens = workload.local_tokens / workload.mesh.tp * architecture.experts_per_token * implementation.expert_imbalance
    size = tokens * architecture.hidden * workload.compute_bytes
    outside = (group.size - group.local) / group.size / (hardware.network_bandwidth * hardware.network_share)
    inside = (group.local - 1) / group.size / (hardware.node_bandwidth * hardware.node_share)
    seconds = 2 * (size * (outside + inside) + group.latency)
    return LayerWork(
        "ep communication",
        seconds,
        seconds,
        _repeats(workload) * seconds,
        f"2 all-to-alls of {size:.4g} B over {group.size}, {group.local} of them in a node",
        _source(group),
    )


def communication_works(
    workload: Workload, kind: LayerKind, groups: MeshGroups, hardware: Hardware, implementation: Implementation
) -> Iterator[LayerWork]:
    """Yield the collectives of a layer that computation waits for, per micro-batch; only axes larger than 1."""
    if workload.mesh.tp > 1:
        yield _tp_work(workload, kind, groups.tp, implementation)
    if workload.mesh.cp > 1 and (kind.attends or kind.is_linear):
        yield _cp_work(workload, kind, groups.cp, implementation)
    if workload.mesh.ep > 1 and kind.has_experts:
        yield _ep_work(workload, groups.ep, hardware, implementation)


@dataclass(frozen=True, slots=True)
class ShardingTraffic:
    """Seconds of the data-parallel collectives for a set of parameters, without overlap."""

    gather: float
    """All-gather for one forward or backward."""
    reduce: float
    """Reduction of the gradients over shards and replicas."""
    copies: float
    """Copies of one all-gather between shards and parameters, on the compute stream."""
    gathered: float
    """Bytes of the all-gathered parameters."""
    reduced: float
    """Bytes of the reduced gradients."""


def sharding_traffic(
    weights: tuple[Weight, ...],
    workload: Workload,
    groups: MeshGroups,
    hardware: Hardware,
    implementation: Implementation,
) -> ShardingTraffic:
    """Return the data-parallel collectives for `weights`, which are those of a tp and ep rank."""
    if workload.parallelism.strategy is Strategy.single:
        return ShardingTraffic(0.0, 0.0, 0.0, 0.0, 0.0)
    trained = _trained_share(workload)
    experts = float(sum(weight.size for weight in weights if weight.sharding is Sharding.experts))
    dense = float(sum(weight.size for weight in weights)) - experts
    item = implementation.gather_bytes or workload.compute_bytes
    stored = item if not workload.peft.quantizes else 0.55
    parts = ((dense, groups.fsdp), (experts, groups.expert_fsdp))
    gather = reduce = copies = gathered = reduced = 0.0
    for size, group in parts:
        if not size:
            continue
        sharded = workload.is_sharded and group.size > 1
        if sharded:
            gather += group.all_gather(size * stored)
            reduce += group.all_gather(size * trained * implementation.reduce_bytes)
            copies += size * 2 * stored / hardware.copy_bandwidth
            gathered += size * stored
        shards = group.size if workload.is_sharded else 1
        reduced += size * trained * implementation.reduce_bytes
        reduce += groups.replicas.all_reduce(size * trained * implementation.reduce_bytes / shards)
    return ShardingTraffic(gather, reduce, copies, gathered, reduced)


def exposed_seconds(communication: float, computation: float, *, overlaps: bool = True) -> float:
    """Return the seconds by which communication beside `computation` prolongs a step: the part that outlasts the
    computation, and the slowdown by the part that does not.

    Args:
        overlaps: Whether a device computes while it communicates. On a CPU, the same cores do both.
    """
    if not overlaps:
        return communication
    hidden = min(communication, computation)
    return communication - hidden + _OVERLAP_LOSS * hidden


def _trained_share(workload: Workload) -> float:
    """Return the share of a matrix's elements that are trained: LoRA adds rank x (rows + columns)."""
    if not workload.peft.adapts:
        return 1.0
    architecture = workload.architecture
    features = architecture.expert_mlp or architecture.mlp or architecture.hidden
    return min(1.0, workload.peft.rank * (1 / architecture.hidden + 1 / features))


def _repeats(workload: Workload) -> float:
    """Return how often the recomputation repeats the collectives of a layer's forward."""
    policy = workload.parallelism.activation_checkpointing.value
    return {"full": 1.0, "selective": 1.0, "alternate": 0.5}.get(policy, 0.0)


def _group(size: int, stride: int, hardware: Hardware) -> Group:
    return _group_of(size, _local_ranks(size, stride, hardware), hardware)


def _local_ranks(size: int, stride: int, hardware: Hardware) -> int:
    """Return the minimum number of an axis' ranks per node; the axis has `size` ranks, `stride` apart."""
    return min(size, max(1, math.gcd(hardware.gpus_per_node, size * stride) // stride))


def _group_of(size: int, local: int, hardware: Hardware) -> Group:
    bandwidth = _node_bandwidth(local, hardware) if local > 1 else math.inf
    nodes = -(-size // local)
    if nodes > 1:
        # A ring enters and leaves each node once, and the groups of the node's other ranks do so beside it.
        bandwidth = min(bandwidth, local * hardware.network_bandwidth * hardware.network_share)
    latency = hardware.node_latency * math.log2(local) + hardware.network_latency * math.log2(nodes)
    return Group(size, local, bandwidth, latency)


def _node_bandwidth(ranks: int, hardware: Hardware) -> float:
    """Return the bytes/s of a rank within a group of `ranks` of a node."""
    links = 1.0
    if hardware.node_links is NodeLinks.direct:
        links = min(1.0, (ranks - 1) / max(1, hardware.gpus_per_node - 1))
    return hardware.node_bandwidth * hardware.node_share * links


def _source(group: Group) -> str:
    return "node_bandwidth x node_share" if group.local == group.size else "network_bandwidth x network_share"
