"""Time of an optimizer step: what the slowest pipeline rank does for each micro-batch, and what is done once a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from components.config.schema.optimizer import MuonConfig, OptimizerKind, SGDConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.run import PeftConfig
from components.config.shape import local_heads, stage_layers
from components.planning.formulas.architecture import Sharding, Weight
from components.planning.formulas.communication import (
    MeshGroups,
    ShardingTraffic,
    communication_works,
    exposed_seconds,
    link_bandwidth,
    mesh_groups,
    sharding_traffic,
)
from components.planning.formulas.families import LayerKind
from components.planning.formulas.hardware import Hardware, LayerWork, Matmul, head_work, layer_works, recomputed_share
from components.planning.formulas.layer_memory import layer_activations
from components.planning.formulas.pipeline import StageSeconds, pipeline_seconds, rank_seconds, send_hops
from components.planning.formulas.workload import MESHBOOK, Implementation, Term, Workload, total

_LAUNCHES, _FUSED_LAUNCHES, _COMPILED_LAUNCHES = 121, 60, 45
"""Kernels that the host launches for the forward and backward of a dense layer: with transformers' own layers, with
fused norms and rotary embeddings, compiled (tests/gpu_ready/test_launches.py)."""
_ADAPTER_LAUNCHES = 59
"""Further kernels of a layer with adapters."""
_ROUTING_LAUNCHES = 45
"""Kernels of a layer's forward that are launched late, because the host has waited for the routing of tokens (ep)."""
_DTENSOR_SECONDS = 1e-4
"""Host time of a redistribution of a DTensor, without a compiler."""
_OPTIMIZER_PASSES = {
    OptimizerKind.adamw: 7.0,  # parameter, gradient and two moments read; parameter and moments written
    OptimizerKind.adamw8bit: 4.0,  # the moments are read and written with a byte per element
    OptimizerKind.lion: 25.0,  # without a fused kernel: the passes of nine elementwise operations
    OptimizerKind.sgd: 3.0,
    OptimizerKind.muon: 5.0,
    OptimizerKind.normuon: 5.0,
    OptimizerKind.custom: 7.0,
}
"""Reads and writes of an element per update, each of the size of a stored parameter."""
_NORM_PASSES = 3.0
"""Reads and writes of a gradient for the gradient norm and clipping."""

BUBBLE = "pipeline bubble"
"""Name of the term that is the idle time of the slowest rank."""
TIME_ERROR = 0.11
"""90th percentile of the error of a step's time, of published runs that no constant was fitted to (published.py)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimate of a step."""

    terms: tuple[Term, ...]
    """Seconds, those of 0 left out. Their sum is `seconds`."""
    seconds: float
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs, without recomputation, / (seconds x peak of all GPUs)."""
    stages: tuple[StageSeconds, ...]
    """Seconds of a micro-batch in each pipeline stage; `pipeline.timeline` schedules a step from them."""
    send_seconds: float
    """Seconds to send a micro-batch's hidden states to the next stage; 0 without pipeline parallelism."""


class _Part(NamedTuple):
    """Part of the model: a pipeline stage, or all stages of a pp rank."""

    kinds: Counter[LayerKind]
    """Number of layers of each kind."""
    embeds: bool
    has_head: bool

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.kinds.total()


class _Layer:
    """Work and weights of a layer, for a micro-batch of a rank."""

    def __init__(self, estimate: _Estimate, kind: LayerKind) -> None:
        workload, hardware, implementation = estimate.workload, estimate.hardware, estimate.implementation
        self.works = [
            *layer_works(workload, kind, hardware, implementation),
            *communication_works(workload, kind, estimate.groups, hardware, implementation),
        ]
        self.held = tuple(workload.architecture.layer_weights(kind, workload.mesh.tp, workload.mesh.ep))
        self.traffic = estimate.traffic(self.held)
        self.forward = sum(work.forward for work in self.works)
        self.backward = sum(work.backward + work.recomputed for work in self.works)
        self.weights = sum(work.weights for work in self.works)
        self.size = sum(weight.size for weight in self.held)
        self.experts = sum(weight.size for weight in self.held if weight.sharding is Sharding.experts)
        policy = workload.parallelism.activation_checkpointing
        self.saved = layer_activations(workload, kind).of(policy) if workload.parallelism.activation_offload else 0.0


def estimate_time(workload: Workload, hardware: Hardware, implementation: Implementation = MESHBOOK) -> StepTime:
    """Return the time of an optimizer step. activation_checkpointing=auto counts as none: resolve it first."""
    return _Estimate(workload, hardware, implementation).step_time()


def model_flops(workload: Workload) -> float:
    """Return the model FLOPs of a step: 6 per token and matrix element, 4 if it is frozen, and attention."""
    architecture = workload.architecture
    head = (architecture.vocab - workload.labels) * architecture.hidden if workload.labels else 0  # which it lacks
    frozen = architecture.matmul_weights - (
        architecture.vocab * architecture.hidden if workload.peft.trains_ends else head
    )
    less = 6.0 * head + 2.0 * frozen * workload.peft.adapts
    return workload.rows_per_step * (architecture.step_flops_per_row(workload.seq_len) - less * workload.seq_len)


class _Estimate:
    """Values that several terms need."""

    def __init__(self, workload: Workload, hardware: Hardware, implementation: Implementation) -> None:
        self.workload, self.hardware, self.implementation = workload, hardware, implementation
        mesh, parallelism = workload.mesh, workload.parallelism
        self.stage_ranks = parallelism.stage_ranks(mesh.pp)
        self.groups: MeshGroups = mesh_groups(mesh, hardware)
        self.layers = {kind: _Layer(self, kind) for kind in dict.fromkeys(workload.architecture.kinds)}
        self.head: LayerWork = head_work(workload, hardware, implementation)
        self.outer = tuple(workload.architecture.outer_weights(mesh.tp))
        self.outer_traffic = self.traffic(self.outer)
        self.head_traffic = self.traffic(tuple(each for each in self.outer if each.name == "head"))
        pipelined = mesh.pp > 1
        reshards = parallelism.reshards_after_forward(mesh.pp)
        self.micro_batches = workload.micro_batches
        self.forward_gathers, self.backward_gathers = self._gathers(reshards)
        deferred = pipelined or parallelism.defers_grad_sync or not workload.is_sharded
        self.reductions = 1 if deferred else self.micro_batches
        self.deferred = deferred

    def _sum(self, part: _Part, value: Callable[[_Layer], float]) -> float:
        """Return the sum of a value over the layers of a part."""
        return sum(count * value(self.layers[kind]) for kind, count in part.kinds.items())

    def _gathers(self, reshards: bool) -> tuple[int, int]:
        """Return how often each layer is all-gathered in forwards and in backwards.

        torch's pipelines keep parameters gathered after a backward, and so until the end of the next forward. Forwards
        that follow a forward gather, and backwards that follow a forward.
        """
        number, pp = self.micro_batches, self.workload.mesh.pp
        if pp == 1:
            return number, number if reshards else 0
        return (min(number, pp), max(1, number + 1 - pp)) if reshards else (1, 0)

    def step_time(self) -> StepTime:
        """Return the estimate."""
        workload = self.workload
        stages = tuple(self._stage(part) for part in _stage_parts(workload))
        ranks = rank_seconds(self.stage_ranks, stages)
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].forward + ranks[rank].backward)
        rank = _rank_parts(workload)[slowest]
        terms = [*self._repeated(rank), *self._data_parallel(rank)]
        terms += self._without_gradients(rank)
        send = self._send_seconds()
        terms += self._pipeline(stages, ranks[slowest], send)
        terms.append(self._launches(rank, total(terms)))
        terms.append(self._routing(rank))
        terms.append(self._activation_offload(rank))
        terms.append(self._sampling())
        terms += self._once(rank)
        terms = [term for term in terms if term.value > 0]
        seconds = total(terms)
        world = workload.mesh.world
        return StepTime(
            terms=tuple(terms),
            seconds=seconds,
            tokens_per_second_per_gpu=workload.tokens_per_step / seconds / world,
            mfu=model_flops(workload) / (seconds * world * self.hardware.peak_flops(workload.compute_bytes)),
            stages=stages,
            send_seconds=send,
        )

    def _stage(self, part: _Part) -> StageSeconds:
        """Return the seconds of a micro-batch in a stage; data-parallel communication is spread over micro-batches."""
        gathers, reductions = self._exposed(part)
        head = part.has_head
        return StageSeconds(
            forward=self._sum(part, lambda each: each.forward)
            + head * self.head.forward
            + gathers[0] / self.micro_batches,
            backward=self._sum(part, lambda each: each.backward)
            + head * self.head.backward
            + (gathers[1] + reductions) / self.micro_batches,
            weights=self._sum(part, lambda each: each.weights) + head * self.head.weights,
        )

    def _repeated(self, rank: _Part) -> Iterable[Term]:
        """Yield the work of each micro-batch."""
        terms: dict[str, list[Term]] = {}
        again = 0.0
        for kind, count in rank.kinds.items():
            layers = f"{count} layers of {kind}" if len(rank.kinds) > 1 else f"{count} layers"
            for work in self.layers[kind].works:
                again += count * work.recomputed
                ratio = work.backward / work.forward if work.forward else 0.0
                formula = f"{layers} x {self.micro_batches} micro-batches x {1 + ratio:.3g} passes x ({work.detail})"
                seconds = count * self.micro_batches * (work.forward + work.backward)
                terms.setdefault(work.name, []).append(Term(work.name, seconds, formula, work.source))
        for name, parts in terms.items():  # of all kinds of layers
            yield Term(name, total(parts), " + ".join(each.formula for each in parts), parts[0].source)
        policy = self.workload.parallelism.activation_checkpointing
        formula = f"{self.micro_batches} micro-batches x {again:.4g} s of the layers' forwards ({policy})"
        yield Term("recomputation", self.micro_batches * again, formula)
        if rank.has_head:
            seconds = self.micro_batches * (self.head.forward + self.head.backward)
            passes = 1 + self.head.backward / self.head.forward
            formula = f"{self.micro_batches} micro-batches x {passes:.3g} passes x ({self.head.detail})"
            yield Term(self.head.name, seconds, formula, self.head.source)

    def _exposed(self, rank: _Part) -> tuple[tuple[float, float], float]:
        """Return the exposed seconds per step of gathers in the forward and in the backward, and of reductions."""
        outer, head = self.outer_traffic, self.head_traffic
        ends = (rank.embeds + rank.has_head) / 2
        # A head that is not tied is gathered beside the last layer, and its gradient is reduced beside it.
        hidden_gather = hidden_reduce = 0.0
        if rank.has_head:
            last = self.layers[self.workload.architecture.kinds[-1]]
            hidden_gather = head.gather - self._exposed_by(head.gather, last.forward)
            hidden_reduce = head.reduce - self._exposed_by(head.reduce, last.backward)
        forward = self.forward_gathers * (
            self._sum(rank, lambda each: self._exposed_by(each.traffic.gather, each.forward))
            + ends * outer.gather
            - hidden_gather
        )
        gathers = bool(self.backward_gathers)

        def gathered(layer: _Layer) -> float:
            return self._exposed_by(layer.traffic.gather, layer.backward)

        def reduced(layer: _Layer) -> float:
            both = layer.traffic.reduce + (layer.traffic.gather if gathers else 0.0)
            return self._exposed_by(both, layer.backward) - (gathered(layer) if gathers else 0.0)

        backward = self.backward_gathers * self._sum(rank, gathered)
        reductions = self._sum(rank, reduced) + ends * outer.reduce - hidden_reduce
        if self.workload.mesh.pp > 1:  # torch's pipelines reduce after the last backward
            reductions = self._sum(rank, lambda each: each.traffic.reduce) + ends * outer.reduce
        return (forward, backward), self.reductions * reductions

    def _exposed_by(self, communication: float, computation: float) -> float:
        return exposed_seconds(communication, computation, overlaps=self.hardware.is_gpu)

    def _data_parallel(self, rank: _Part) -> Iterable[Term]:
        """Yield the exposed communication of FSDP2 and DDP, and its copies."""
        gathers, reduced = self._exposed(rank)
        outer, fsdp = self.outer_traffic, self.groups.fsdp
        rounds = self.forward_gathers + self.backward_gathers
        layers, gather_seconds, reduce_seconds = (
            self._sum(rank, lambda each: each.traffic.gathered),
            self._sum(rank, lambda each: each.traffic.gather),
            self._sum(rank, lambda each: each.traffic.reduce),
        )
        if layers:
            yield Term(
                "FSDP all-gathers (exposed)",
                sum(gathers),
                f"{rounds} rounds x {rank.layers} layers x {layers / rank.layers:.4g} B over {fsdp.size} / "
                f"{fsdp.bandwidth:.3g} B/s = {rounds * gather_seconds:.4g} s, less what computation hides",
                self.hardware.name,
            )
        yield Term(
            "gradient reduction (exposed)",
            reduced,
            f"{self.reductions} x ({reduce_seconds:.4g} s of {rank.layers} layers + {outer.reduce:.4g} s), less what "
            "computation hides",
            self.hardware.name,
        )
        size = layers + (rank.embeds + rank.has_head) / 2 * outer.gathered
        if layers:
            values = self._parameters(rank) * self.reductions * (2 + self.implementation.reduce_bytes)
            copies = (2 * rounds * size + values) / self.hardware.copy_bandwidth
            formula = f"({rounds} x 2 x {size:.4g} B + {values:.4g} B) / {self.hardware.copy_bandwidth:.3g} B/s"
            yield Term("FSDP copies", copies, formula, f"{self.hardware.name}: copy_share")
        if self.micro_batches > 1 and not self.workload.peft.adapts:
            moved = 10 if self.deferred and self.workload.is_sharded else 3 * self.workload.stored_bytes
            parameters = self._parameters(rank)
            value = (self.micro_batches - 1) * parameters * moved / self.hardware.copy_bandwidth
            formula = (
                f"{self.micro_batches - 1} x {parameters:,.0f} x {moved} B / {self.hardware.copy_bandwidth:.3g} B/s"
            )
            yield Term("gradient accumulation", value, formula, f"{self.hardware.name}: copy_share")

    def _without_gradients(self, rank: _Part) -> Iterable[Term]:
        """Yield the forwards without gradients: first passes of preference losses, reference, teacher."""
        workload, mesh = self.workload, self.workload.mesh
        times = self.micro_batches + mesh.pp - 1
        if workload.extra_forwards:
            gathers = self._exposed(rank)[0][0] / self.forward_gathers
            forward = self._sum(rank, lambda each: each.forward) + rank.has_head * self.head.forward + gathers
            formula = f"{workload.extra_forwards:g} x {times} x {forward:.4g} s"
            yield Term("forwards without gradients", workload.extra_forwards * times * forward, formula)
        if workload.frozen is not None:
            parallelism = replace(workload.parallelism, activation_checkpointing=ActivationCheckpointing.none)
            other = replace(
                workload,
                architecture=workload.frozen,
                frozen=None,
                extra_forwards=0.0,
                peft=PeftConfig(),
                parallelism=parallelism,
            )
            frozen = _Estimate(other, self.hardware, self.implementation)
            last = max(_rank_parts(other), key=lambda each: (each.has_head, each.layers))
            forward = frozen._sum(last, lambda each: each.forward) + frozen.head.forward
            forward += frozen._exposed(last)[0][0] / frozen.forward_gathers
            yield Term("forwards of the frozen model", times * forward, f"{times} x {forward:.4g} s")

    def _send_seconds(self) -> float:
        workload, mesh = self.workload, self.workload.mesh
        if mesh.pp == 1:
            return 0.0
        size = workload.local_tokens * workload.architecture.hidden * workload.compute_bytes
        return size / link_bandwidth(mesh.world // mesh.pp, self.hardware) + self.hardware.network_latency

    def _pipeline(self, stages: tuple[StageSeconds, ...], slowest: StageSeconds, send: float) -> Iterable[Term]:
        """Yield the idle time of the slowest rank, and its sends."""
        pp, schedule = self.workload.mesh.pp, self.workload.parallelism.pp_schedule
        if pp == 1:
            return
        busy = self.micro_batches * (slowest.forward + slowest.backward)
        seconds, formula = pipeline_seconds(schedule, self.stage_ranks, stages, self.micro_batches)
        yield Term(BUBBLE, max(0.0, seconds - busy), f"{formula} - {busy:.4g} s busy ({schedule})")
        hops = send_hops(schedule, pp, len(stages) // pp, self.micro_batches)
        yield Term("pipeline sends", hops * send, f"{hops:g} x {send:.4g} s", self.hardware.name)

    def _launches(self, rank: _Part, device: float) -> Term:
        """Return the time by which the host's launches outlast the device."""
        workload = self.workload
        layer = _FUSED_LAUNCHES if workload.fused else _LAUNCHES
        launches = _COMPILED_LAUNCHES if workload.compiled else layer
        launches += _ADAPTER_LAUNCHES if workload.peft.adapts else 0
        seconds = launches * self.hardware.launch_seconds
        if workload.mesh.tp > 1 and not workload.compiled:
            seconds += 4 * (self.implementation.tp_gathers + 2) / 2 * _DTENSOR_SECONDS
        host = self.micro_batches * rank.layers * seconds
        return Term(
            "kernel launches (exposed)",
            max(0.0, host - device),
            f"{self.micro_batches} micro-batches x {rank.layers} layers x {seconds:.3g} s - {device:.4g} s of work",
            f"{self.hardware.name}: launch_seconds",
        )

    def _routing(self, rank: _Part) -> Term:
        """Return the idle time of the device while the host, which waited for the routing, launches kernels again."""
        hardware, policy = self.hardware, self.workload.parallelism.activation_checkpointing
        passes = 1 + recomputed_share(policy, 1.0)
        layers = sum(count for kind, count in rank.kinds.items() if kind.has_experts)
        waits = self.micro_batches * layers * passes if self.workload.mesh.ep > 1 else 0.0
        return Term(
            "routing waits",
            waits * _ROUTING_LAUNCHES * hardware.launch_seconds * self.implementation.waits_for_routing,
            f"{waits:g} waits x {_ROUTING_LAUNCHES} launches x {hardware.launch_seconds:.3g} s",
            f"{hardware.name}: launch_seconds",
        )

    def _sampling(self) -> Term:
        """Return the time of sampling: for each token a forward that reads the weights and half of the cache, or that
        launches a third of the kernels of a step. Gathering the weights once is left out."""
        workload, hardware, cached = self.workload, self.hardware, 0.0
        architecture, tp, item = workload.architecture, workload.mesh.tp, workload.compute_bytes
        for kind in filter(lambda each: each.attends, architecture.kinds):
            heads, kv_heads, _ = architecture.heads_of(kind)
            cached += local_heads(heads, kv_heads, tp)[1] * sum(architecture.score_widths(kind))
        weights = sum(weight.size for weight in self.outer) + sum(self.layers[each].size for each in architecture.kinds)
        moved = item * (weights + workload.generated_rows * workload.generated_tokens / 2 * cached)
        host = len(architecture.kinds) * _LAUNCHES / 3 * hardware.launch_seconds
        return Term(
            "sampling of answers",
            workload.sampling_forwards * max(moved / hardware.copy_bandwidth, host),
            f"{workload.sampling_forwards:,.0f} forwards of {workload.generated_rows} rows x max({moved:.3g} B / "
            f"{hardware.copy_bandwidth:.3g} B/s, kernels of {len(architecture.kinds)} layers launched in {host:.3g} s)",
        )

    def _activation_offload(self, rank: _Part) -> Term:
        """Return the time of copies of saved activations that computation of the next layer does not hide."""
        hardware, layers = self.hardware, max(1, rank.layers)

        def copy_exposed(layer: _Layer) -> float:
            copy = layer.saved / hardware.host_bandwidth if layer.saved else 0.0
            return max(0.0, copy - layer.forward) + max(0.0, copy - layer.backward)

        saved, exposed = self._sum(rank, lambda each: each.saved) / layers, self._sum(rank, copy_exposed) / layers
        copies = self.micro_batches * max(0, rank.layers - 1)
        return Term(
            "activation offload (exposed)",
            copies * exposed,
            f"{copies} layers x {exposed:.3g} s of twice {saved:.4g} B / {hardware.host_bandwidth:.3g} B/s, less what "
            "computation hides",
            f"{hardware.name}: host_bandwidth",
        )

    def _once(self, rank: _Part) -> Iterable[Term]:
        """Yield the work once per step: gradient norm, update, average, and what offloading moves."""
        workload, hardware, optimizer = self.workload, self.hardware, self.workload.optimizer
        parameters = self._sharded_parameters(rank)
        stored = workload.stored_bytes
        trained_bytes = workload.trained_bytes
        moved = (_OPTIMIZER_PASSES[optimizer.kind] + _NORM_PASSES) * trained_bytes
        if optimizer.kind is OptimizerKind.adamw8bit:
            moved += 4
        if isinstance(optimizer, SGDConfig) and optimizer.momentum:
            moved += 2 * trained_bytes
        if workload.averages:
            moved += 3 * trained_bytes
        bandwidth = hardware.copy_bandwidth
        if workload.parallelism.cpu_offload:
            bandwidth = min(bandwidth, hardware.host_memory_bandwidth * hardware.copy_share)
        yield Term(
            "optimizer",
            parameters * moved / bandwidth,
            f"{parameters:,.0f} parameters x {moved:g} B / {bandwidth:.3g} B/s",
            f"{hardware.name}: {'host_memory_bandwidth' if workload.parallelism.cpu_offload else 'copy_share'}",
        )
        if isinstance(optimizer, MuonConfig):
            yield self._muon(rank, optimizer)
        if workload.parallelism.cpu_offload:
            rounds = self.forward_gathers + self.backward_gathers
            trained = 4 * self.reductions * (not workload.peft.adapts)
            size = self._sharded_parameters(rank, trained=False) * (rounds * stored + trained)
            formula = f"{size:.4g} B / {hardware.host_bandwidth:.3g} B/s"
            yield Term("cpu offload", size / hardware.host_bandwidth, formula, f"{hardware.name}: host_bandwidth")

    def _muon(self, rank: _Part, optimizer: MuonConfig) -> Term:
        """Return the Newton-Schulz iterations: each matrix whole, on one of the ranks that share it."""
        mesh, workload = self.workload.mesh, self.workload
        sharing = (workload.fsdp if workload.is_sharded else 1) * mesh.tp
        rate = self.hardware.matmul_flops(2)
        flops = seconds = 0.0
        for kind, layers in rank.kinds.items():
            for weight in workload.architecture.layer_weights(kind):
                if not weight.is_matrix or weight.name == "router":
                    continue
                experts = weight.rows if weight.sharding is Sharding.experts else 1
                width = workload.architecture.hidden if experts > 1 else weight.width
                rows = weight.size // experts // width
                small, large = min(rows, width), max(rows, width)
                iteration = 4.0 * small * small * large + 2.0 * small**3
                count = max(1.0, layers * experts / sharing)
                flops += count * optimizer.ns_steps * iteration
                slowdown = Matmul(small, small, large).slowdown(self.hardware.matmul_tile)
                seconds += count * optimizer.ns_steps * iteration * slowdown / rate
        sent = 2 * 2 * self._sharded_parameters(rank) / self.groups.fsdp.bandwidth if sharing > 1 else 0.0
        formula = f"{flops:.4g} FLOP / {rate:.3g} FLOP/s + {sent:.3g} s of all-to-alls"
        return Term("Newton-Schulz iterations", seconds + sent, formula, f"{self.hardware.name}: matmul_share")

    def _parameters(self, rank: _Part) -> float:
        """Return the unsharded parameters of a rank, after tp and ep."""
        outer = sum(weight.size for weight in self.outer)
        return self._sum(rank, lambda each: each.size) + (rank.embeds + rank.has_head) / 2 * outer

    def _sharded_parameters(self, rank: _Part, *, trained: bool = True) -> float:
        """Return the parameters of a rank after FSDP; by default, those that are trained."""
        workload = self.workload
        experts = self._sum(rank, lambda each: each.experts)
        shards = (self._parameters(rank) - experts) / workload.fsdp + experts / workload.expert_fsdp
        if not (trained and workload.peft.adapts):
            return shards
        widths = self._sum(
            rank, lambda each: sum(weight.rows + weight.width for weight in each.held if weight.is_matrix)
        )
        return workload.peft.rank * widths / workload.fsdp

    def traffic(self, weights: tuple[Weight, ...]) -> ShardingTraffic:
        """Return the data-parallel collectives of weights."""
        return sharding_traffic(weights, self.workload, self.groups, self.hardware, self.implementation)


def _stage_parts(workload: Workload) -> list[_Part]:
    """Return the parts of the model that the pipeline stages compute, in order."""
    number = len(workload.parallelism.stage_ranks(workload.mesh.pp))
    kinds = workload.architecture.kinds
    layers = stage_layers(len(kinds), number)
    return [
        _Part(Counter(kinds[index] for index in each), stage == 0, stage == number - 1)
        for stage, each in enumerate(layers)
    ]


def _rank_parts(workload: Workload) -> list[_Part]:
    """Return the parts of the model that the pp ranks compute."""
    parts = [_Part(Counter(), False, False)] * workload.mesh.pp
    for rank, stage in zip(workload.parallelism.stage_ranks(workload.mesh.pp), _stage_parts(workload), strict=True):
        part = parts[rank]
        parts[rank] = _Part(part.kinds + stage.kinds, part.embeds or stage.embeds, part.has_head or stage.has_head)
    return parts
