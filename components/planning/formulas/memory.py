"""Peak memory of the fullest rank in an optimizer step.

Six moments can be the fullest. In all of them a rank holds its parameters and its optimizer state, and gradients of
the micro-batches before.

- The all-gather of a head that is not tied: all activations, the head, and the buffer it is copied from.
- The loss's backward: all activations, the logits, and the gathered head.
- The reduction of a head that is not tied: all activations, its gradients and their copy for the reduce-scatter.
- The last layer's backward: all activations, and the layers that FSDP2 has gathered by then. With several kinds of
  layers, that of the last layer of each kind: activations up to it, and gradients of the layers after it.
- The first layer's backward: all gradients, and the buffers of the last reductions.
- The optimizer step: all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from components.config.compute_rules import CHUNK_LOGITS, chunk_logits
from components.config.schema.model import LossMethod
from components.config.schema.optimizer import AdamW8bitConfig, CustomOptimizerConfig, LionConfig, MuonConfig, SGDConfig
from components.config.schema.parallelism import (
    SINGLE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    ActivationCheckpointing,
    Strategy,
)
from components.config.schema.run import PeftConfig
from components.config.shape import local_heads, stage_layers
from components.planning.formulas.layer_memory import Held, Layer, held, read_layer
from components.planning.formulas.workload import Term, Workload, total

_EIGHT_BIT_BYTES = 2.03
"""Bytes per weight of two 8-bit moments with their scales."""
_LAYERS_GATHERED = 4
"""Layers in gathered form at once under FSDP2: the last one, which is not resharded after the forward, the next one,
and the prefetched one with its communication buffer."""
_LOGIT_BYTES = 4 + 3 * 8
"""Of a token of the vocabulary while one is sampled: the logit, its score, the noise, and a hash of it."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of one rank at its fullest moment."""

    stage: int
    """Coordinate of the rank on the pp axis."""
    moment: str
    """The fullest of the moments."""
    terms: tuple[Term, ...]
    """What the rank holds then, in bytes."""

    @property
    def peak(self) -> int:
        """Bytes of all terms."""
        return int(total(self.terms))

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return int(total(term for term in self.terms if term.name in ("parameters", "gradients", "optimizer")))

    def bytes_of(self, name: str) -> float:
        """Return the bytes of a term; 0 if the moment does not have it."""
        return total(term for term in self.terms if term.name == name)


def estimate_memory(workload: Workload, device: str = "cuda") -> MemoryEstimate:
    """Return the memory of the fullest rank.

    Args:
        device: cuda or cpu: the chunks of the loss differ.
    """
    stages = {0, workload.mesh.pp - 1, min(1, workload.mesh.pp - 1)}
    return max((rank_memory(workload, stage, device) for stage in sorted(stages)), key=lambda each: each.peak)


def rank_memory(w: Workload, stage: int, device: str) -> MemoryEstimate:
    """Return the memory of a rank with coordinate `stage` on pp, at its fullest moment."""
    rank = _read_rank(w, stage)
    state = _state_terms(w, rank)
    on_device = 0.0 if w.parallelism.cpu_offload else rank.trained.sharded
    gradients = Term(
        "gradients", on_device * w.trained_bytes, f"{on_device:,.0f} trained elements x {w.trained_bytes} B"
    )
    waiting = _waiting_gradients(w, rank, gradients)
    activations, in_flight = _activation_terms(w, rank, len(rank.layers))[0], _micro_batches_in_flight(w, stage)
    if w.mesh.pp > 1 and in_flight >= w.micro_batches:
        waiting = []  # no backward has run while all micro-batches are in flight
    moments = {
        "the head is gathered": [
            *state,
            *waiting,
            activations,
            _gathered_term(w, rank, 2 if device == "cpu" else 1, head=True),  # gloo's copy exists during the last layer
            _head_buffers(w, rank, w.compute_bytes),
        ],
        "the backward of the loss begins": [
            *state,
            *waiting,
            activations,
            _loss_term(w, device) if rank.last else Term("loss", 0.0, "on the last stage"),
            _gathered_term(w, rank, 1, head=True),
        ],
        "the gradients of the head are reduced": [
            *state,
            *waiting,
            activations,
            _head_gradients(w, rank),
            _head_buffers(w, rank, _accumulated_bytes(w) * w.peft.trains_ends * (2 if device == "cpu" else 1)),
            _gathered_term(w, rank, 1),
        ],
        **{
            f"the backward of {'the last layer' if number == len(rank.layers) else f'layer {number}'} begins": [
                *state,
                *(waiting or _later_gradients(w, rank, number)),
                *_activation_terms(w, rank, number),
                _gathered_term(w, rank, _layers_gathered(w), number),
                _cast_gradients(w, rank, number),
            ]
            for number in rank.last_of_kinds
        },
        "the backward of the first layer ends": [*state, *_last_gradients(w, rank, gradients, activations, in_flight)],
        "the optimizer runs": [*state, gradients],
        "answers are generated": [*state, *_generation_terms(w, rank), _gathered_term(w, rank, 2, head=True)],
    }
    moment = max(moments, key=lambda each: total(moments[each]))
    return MemoryEstimate(stage, moment, tuple(each for each in moments[moment] if each.value))


@dataclass(frozen=True, slots=True)
class _Rank:
    """Parameters of one rank."""

    stage: int
    layers: tuple[Layer, ...]
    """Those of all its stages, in order."""
    first: bool
    """Whether it holds the embedding."""
    last: bool
    """Whether it holds the head."""
    outer: Held
    """Weights outside of the layers."""
    head: float
    """Elements of the head, not sharded over fsdp."""
    tied_copy: Held
    """Copy of a tied head on the last stage, whose gradients go to the embedding's rank."""
    trained: Held

    @property
    def last_of_kinds(self) -> list[int]:
        """Numbers, from 1, of the last layer of each kind."""
        return sorted({layer.kind: number for number, layer in enumerate(self.layers, 1)}.values())

    @property
    def largest(self) -> Layer:
        """The layer with the most trained elements."""
        return max(self.layers, key=lambda each: each.trained.gathered)

    def gathered(self, layers: int, number: int) -> float:
        """Return the base elements of the layers from `number` backwards."""
        return sum(each.base.gathered for each in self.layers[max(0, number - layers) : number])


def _read_rank(w: Workload, stage: int) -> _Rank:
    """Return the parameters of a rank with coordinate `stage` on pp."""
    architecture, mesh = w.architecture, w.mesh
    ranks = w.parallelism.stage_ranks(mesh.pp)
    parts = stage_layers(architecture.layers, len(ranks))
    numbers = [number for part, rank in zip(parts, ranks, strict=True) if rank == stage for number in part]
    first, last = ranks[0] == stage, ranks[-1] == stage
    by_kind = {kind: read_layer(w, kind) for kind in set(architecture.kinds)}
    layers = tuple(by_kind[architecture.kinds[number]] for number in numbers)
    outer, tied_copy, head = Held(), Held(), 0.0
    for weight in architecture.outer_weights(mesh.tp):
        is_embedding = weight.name in ("embedding", "positions")
        if weight.name == "head" and w.labels:
            continue
        if first if is_embedding else last:
            outer = outer + held(w, [weight])
        if last and weight.name == ("embedding" if architecture.tied else "head"):
            head = weight.size
            if architecture.tied and mesh.pp > 1:
                tied_copy = held(w, [weight])
    trained = sum((each.trained for each in layers), outer if w.peft.trains_ends else Held())
    return _Rank(stage, layers, first, last, outer, head, tied_copy, trained)


def _state_terms(w: Workload, rank: _Rank) -> list[Term]:
    """Return what a rank always holds, besides gradients."""
    base = sum(each.base.sharded for each in rank.layers)
    adapter = sum(each.adapter.sharded for each in rank.layers)
    stored = sum(each.base.sharded * each.stored_bytes for each in rank.layers)
    outer = rank.outer.sharded + rank.tied_copy.sharded
    trained = rank.trained.sharded
    outer_bytes = w.trained_bytes if w.peft.trains_ends else w.stored_bytes
    terms = [
        Term(
            "parameters",
            stored + outer * outer_bytes + adapter * w.trained_bytes,
            f"{base:,.0f} elements of {len(rank.layers)} layers x {stored / base:.4g} B, {outer:,.0f} others x "
            f"{outer_bytes} B" + (f" and {adapter:,.0f} of adapters x {w.trained_bytes} B" if adapter else ""),
        ),
        _optimizer_term(w, trained, rank.outer.sharded),
    ]
    if w.averages:
        terms.append(Term("average", trained * max(4, w.stored_bytes), f"{trained:,.0f} x {max(4, w.stored_bytes)} B"))
    if w.frozen is not None:
        other = _read_rank(replace(w, architecture=w.frozen, peft=PeftConfig(), labels=0), rank.stage)
        frozen = sum(each.base.sharded for each in other.layers) + other.outer.sharded + other.tied_copy.sharded
        terms.append(Term("frozen model", frozen * w.frozen_bytes, f"{frozen:,.0f} elements x {w.frozen_bytes} B"))
    return [] if w.parallelism.cpu_offload else terms  # then in host memory


def _optimizer_term(w: Workload, trained: float, outer: float) -> Term:
    """Return the optimizer state of `trained` elements, `outer` of which are outside of the layers."""
    stored = w.trained_bytes
    match w.optimizer:
        case AdamW8bitConfig():
            size, formula = trained * _EIGHT_BIT_BYTES, f"{trained:,.0f} x {_EIGHT_BIT_BYTES} B: two 8-bit moments"
        case MuonConfig():
            size = (trained + outer) * stored
            formula = f"one moment of {trained - outer:,.0f} elements and two of {outer:,.0f}, {stored} B each"
        case LionConfig():
            size, formula = trained * max(4, stored), f"{trained:,.0f} x one moment x {max(4, stored)} B"
        case SGDConfig():
            size, formula = trained * stored * bool(w.optimizer.momentum), f"momentum {w.optimizer.momentum:g}"
        case CustomOptimizerConfig():
            size, formula = trained * 2 * stored, f"{trained:,.0f} x 2 x {stored} B: assumed to be like AdamW's"
        case _:
            size, formula = trained * 2 * stored, f"{trained:,.0f} x 2 moments x {stored} B"
    return Term("optimizer", size, formula)


def _accumulated_bytes(w: Workload) -> int:
    """Return the bytes per element of gradients that FSDP2 has not reduced: float32 or wider."""
    return max(4, w.stored_bytes)


def _defers(w: Workload) -> bool:
    """Return whether gradients wait unsharded until the last micro-batch."""
    return w.is_sharded and (w.mesh.pp > 1 or (w.micro_batches > 1 and w.parallelism.defers_grad_sync))


def _waiting_gradients(w: Workload, rank: _Rank, gradients: Term) -> list[Term]:
    """Return the gradients that exist before the last micro-batch's backward."""
    if w.parallelism.strategy is Strategy.ddp:
        copies = 2 if w.micro_batches > 1 else 1
        return [Term("gradients", copies * gradients.value, f"{gradients.formula}, in the buckets of DDP too")]
    if w.micro_batches == 1:
        return []
    if not _defers(w):
        return [gradients]
    wide, elements = _accumulated_bytes(w), rank.trained.gathered + rank.tied_copy.gathered * w.peft.trains_ends
    return [Term("gradients", elements * wide, f"{elements:,.0f} unsharded trained elements x {wide} B")]


def _later_gradients(w: Workload, rank: _Rank, number: int) -> Iterator[Term]:
    """Yield the gradients of the layers after layer `number`, of the only micro-batch."""
    elements = sum(each.trained.sharded for each in rank.layers[number:])
    if elements:
        yield Term("gradients", elements * w.trained_bytes, f"{elements:,.0f} elements of later layers")


def _last_gradients(w: Workload, rank: _Rank, gradients: Term, activations: Term, in_flight: float) -> list[Term]:
    """Return what a rank holds besides its state when the last layer's gradients are reduced.

    A pipeline stage accumulates the gradients of a micro-batch only at the end of its backward.
    """
    saved = max(max(each.saved.none, each.saved.full) + each.saved.transient for each in rank.layers)
    one = Term("activations", saved, "one layer")
    if w.mesh.pp > 1:
        others = activations.value * (in_flight - 1) / in_flight
        new = rank.largest.trained.gathered
        kept = Term("activations", others + one.value, f"{in_flight - 1:g} micro-batches in flight, and one layer")
        newest = Term("new gradients", new * _accumulated_bytes(w), f"{new:,.0f} elements of one layer")
        # With all micro-batches in flight, the first backward adds to no gradients, and the last has none beside it.
        return [
            *_waiting_gradients(w, rank, gradients),
            *([newest, kept] if in_flight < w.micro_batches else max([kept], [newest, one], key=total)),
            _split_backward(w, rank),
            _gathered_term(w, rank, len(rank.layers)),
        ]
    buffers = 2 * rank.largest.trained.gathered * _accumulated_bytes(w) if w.fsdp > 1 else 0.0
    reduction = Term("reduction buffers", buffers, "gradients of one layer, and the input of its reduce-scatter")
    return [gradients, one, _gathered_term(w, rank, 2, min(2, len(rank.layers))), reduction]


def _split_backward(w: Workload, rank: _Rank) -> Term:
    """Return the gradients of matmul outputs that V-shaped schedules keep to compute gradients of weights later."""
    if str(w.parallelism.pp_schedule) not in SPLIT_BACKWARD:
        return Term("delayed weight gradients", 0.0, "the backward is not split")
    count = min(w.micro_batches, 2 * w.mesh.pp)
    outputs = sum(
        (each.saved.none if each.kind.has_experts else each.saved.selective) - each.saved.full for each in rank.layers
    )
    return Term(
        "delayed weight gradients",
        outputs * count,
        f"{outputs / _MIB:,.1f} MiB of matmul outputs of {len(rank.layers)} layers x {count} micro-batches",
    )


def _head_gradients(w: Workload, rank: _Rank) -> Term:
    """Return the gradients of a head that is not tied, unless they are among those that wait."""
    is_new = w.micro_batches == 1 or not _defers(w)
    size = rank.head * w.compute_bytes if is_new and not w.architecture.tied and w.peft.trains_ends else 0.0
    return Term("new gradients", size, "of the head")


def _head_buffers(w: Workload, rank: _Rank, item: int) -> Term:
    """Return the buffers of a collective of a head that is not tied, with the copy that gloo makes in a reduce-scatter.

    Args:
        item: Bytes per element.
    """
    applies = w.fsdp > 1 and w.mesh.pp == 1 and not w.architecture.tied
    return Term(
        "communication buffers", applies * rank.head * item, f"{rank.head:,.0f} elements of the head x {item} B"
    )


def _cast_gradients(w: Workload, rank: _Rank, number: int) -> Term:
    """Return the new gradients of layer `number` or the head, before they are reduced or added to those that wait."""
    trained = rank.layers[number - 1].trained.gathered
    size = trained * w.compute_bytes if w.compute_bytes < 4 and _defers(w) else 0.0
    if w.is_sharded and not _defers(w) and w.peft.trains_ends:
        # A tied head is reduced with the embedding; others before the layers, whose reductions wait for it.
        size = rank.head * (w.compute_bytes if w.architecture.tied else _accumulated_bytes(w))
    return Term("new gradients", size, "of one layer, or of the head")


def _activation_terms(w: Workload, rank: _Rank, number: int) -> tuple[Term, Term]:
    """Return the activations of all micro-batches in flight, of the newest those up to layer `number`, and what the
    backward of that layer computes."""
    policy, in_flight = w.parallelism.activation_checkpointing, _micro_batches_in_flight(w, rank.stage)
    each_layer = [each.saved.of(policy) for each in rank.layers]
    final_norm = 0.0
    if rank.last:
        norm = (4 + 2 * w.compute_bytes) * w.architecture.hidden / w.sequence_shards
        final_norm = w.local_tokens * norm
    counted, per_layer = len(rank.layers), sum(each_layer) / len(rank.layers) / _MIB
    activations = Term(
        "activations",
        sum(each_layer) * in_flight - sum(each_layer[number:]) + final_norm,
        f"{per_layer:,.1f} MiB per layer ({policy}) x {counted} layers x {in_flight:g} micro-batches",
    )
    if w.parallelism.activation_offload:
        others = min(counted - 1, 1)  # the layer that is copied while its neighbor computes
        activations = Term(
            "activations",
            each_layer[number - 1] * (in_flight + others) + final_norm,
            f"{per_layer:,.1f} MiB per layer ({policy}) x the last layer of {in_flight:g} micro-batches and "
            f"{others} whose activations are copied to or from the host",
        )
    saved = rank.layers[number - 1].saved
    again = {
        ActivationCheckpointing.full: saved.none,
        ActivationCheckpointing.selective: saved.none - saved.selective + saved.full,
    }.get(policy, 0.0) + saved.transient
    return activations, Term("recomputed layer", again, "activations that the backward of a layer computes")


def _micro_batches_in_flight(w: Workload, stage: int) -> float:
    """Return the most micro-batches whose activations a pp rank holds at once, in units of all its layers.

    Warmup lengths of torch's schedules: 1F1B runs pp - rank forwards first, the interleaved one 2 x (pp - rank - 1) and
    (stages - 1) rounds of pp forwards of one stage each. Schedules with a split backward keep the inputs of matmuls
    until the gradients of their weights are computed.
    """
    pp, schedule, count = w.mesh.pp, str(w.parallelism.pp_schedule), w.micro_batches
    if pp == 1:
        return 1.0
    if schedule in ("GPipe", "LoopedBFS"):
        return float(count)
    if schedule in SINGLE_STAGE:
        return float(min(count, pp - stage))
    if schedule in SPLIT_BACKWARD:
        return min(float(count), (1.5 if schedule in V_SHAPED else 2.0) * pp)
    stages = w.parallelism.stages_per_rank
    rounds = max(1, count // pp)
    warmup = (stages - 1) * (count // rounds) + 2 * (pp - 1 - stage)
    return min(float(count), (warmup + 1) / stages)


def _loss_term(w: Workload, device: str) -> Term:
    """Return the logits and what is computed from them, or the gradient of the head with those of the logits."""
    vocabulary = -(-w.architecture.vocab // w.mesh.tp)
    tokens, hidden, c = w.local_tokens, w.architecture.hidden, w.compute_bytes
    if w.labels:
        return Term("loss", 12.0 * w.micro_batch * w.labels, "12 B x rows x labels")
    known = device == "cuda" and w.device_memory is not None
    at_once = chunk_logits(w.device_memory or 0) if known else CHUNK_LOGITS[device]
    head = vocabulary * hidden * (c + (4 if c < 4 else 0)) * w.peft.trains_ends
    logits = w.architecture.vocab  # tp ranks gather them
    # A run chooses by its configured batch size, which counts pairs.
    fits = tokens // w.rows_per_unit <= max(1, at_once // logits)
    if w.loss is LossMethod.logits or (w.loss is LossMethod.auto and fits):
        wide = max(4, c) + 8  # logits below float32 are freed before the backward
        first, second = tokens * logits * wide, tokens * logits * c + head
        if first > second:
            return Term("loss", first, f"{tokens:,} tokens x {logits:,} logits x {wide} B")
        return Term("loss", second, f"gradients of {tokens:,} x {logits:,} logits and of the head")
    chunks = -(-tokens // max(1, at_once // vocabulary))
    # Logits and log-probabilities in float32; below it also logits, their gradient and that of the chunk before.
    wide = c + 8 + (0 if c >= 4 else c if chunks == 1 else 2 * c)
    rows = -(-tokens // chunks)  # chunks are equally long
    if w.frozen is not None:  # the student's logits and log-probabilities, and the teacher's
        wide = 2 * (c + max(4, c)) + (8 if c < 4 else 0)
    gradient = 4.0 * vocabulary * hidden * w.peft.trains_ends
    return Term(
        "loss",
        rows * vocabulary * wide + gradient + tokens * hidden * c,
        f"chunk of {rows:,} tokens x {vocabulary:,} logits x {wide} B, gradients of the hidden states"
        + f" and of the head (4 B x {vocabulary:,} x {hidden:,})" * w.peft.trains_ends,
    )


def _generation_terms(w: Workload, rank: _Rank) -> list[Term]:
    """Return keys and values of the rows that are generated at once, and their logits with the noise of sampling.

    A layer with a window keeps the tokens in it. Recurrent states are small, and weights that are gathered for all
    tokens at once are only where half of the free memory holds them.
    """
    size, architecture = 0.0, w.architecture
    for layer in rank.layers if w.generated_rows else ():
        if layer.kind.attends:
            heads, kv_heads, _ = architecture.heads_of(layer.kind)
            tokens = w.generated_tokens
            if layer.kind.is_windowed and architecture.window is not None:
                tokens = min(tokens, architecture.window)
            local = local_heads(heads, kv_heads, w.mesh.tp)[1]
            size += w.generated_rows * tokens * local * sum(architecture.score_widths(layer.kind)) * w.compute_bytes
    logits = w.generated_rows * w.architecture.vocab * _LOGIT_BYTES
    shown = f"{w.generated_rows} rows of {w.generated_tokens:,} tokens"
    return [Term("keys and values", size, shown), Term("logits", logits, f"{shown}, with noise in float64")]


def _layers_gathered(w: Workload) -> int:
    """Return the layers in gathered form when the backward of the last layer begins.

    Experts are FSDP2 units of their own, and prefetched one at a time.
    """
    if w.fsdp == 1:
        return 2
    if w.architecture.experts:
        return _LAYERS_GATHERED - (1 if w.expert_fsdp > 1 else 2)
    return _LAYERS_GATHERED


def _gathered_term(w: Workload, rank: _Rank, layers: int, number: int | None = None, *, head: bool = False) -> Term:
    """Return the parameters that FSDP2 holds gathered at once, in the compute dtype, or copies by autocast.

    Args:
        layers: How many layers.
        number: The last of them, from 1; None: the last layer.
        head: Whether a head that is not tied is among them: until its backward has ended. A tied head always is.
    """
    if not w.is_sharded:
        if w.compute_bytes == w.stored_bytes:
            return Term("gathered parameters", 0.0, "nothing is gathered")
        # 4-bit weights are dequantized one at a time.
        size = (sum(each.base.gathered * (1 - each.quantized) for each in rank.layers) + rank.head) * w.compute_bytes
        return Term("gathered parameters", size, "autocast keeps copies of the weights in the compute dtype")
    stored = rank.layers[-1].stored_bytes
    wide = stored if stored < 1 else w.compute_bytes  # 4-bit weights are gathered as they are
    freed = 0.0 if head or w.architecture.tied else rank.head
    outer = rank.head - freed
    elements = rank.gathered(layers + w.parallelism.prefetch, number or len(rank.layers))
    every = rank.gathered(len(rank.layers), len(rank.layers))
    largest = max(each.base.gathered for each in rank.layers)
    if not w.parallelism.reshards_after_forward(w.mesh.pp):
        elements, outer = every + largest, rank.outer.gathered - freed
    if w.mesh.pp > 1:  # a stage keeps its parameters gathered between micro-batches; FSDP2 on one rank copies them too
        elements = every + (0.0 if w.architecture.experts or w.fsdp == 1 else largest)
        outer = rank.outer.gathered
    return Term(
        "gathered parameters",
        elements * wide + outer * w.compute_bytes,
        f"{elements:,.0f} elements of layers x {wide:g} B, and {outer:,.0f} elements outside of layers",
    )
